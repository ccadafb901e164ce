"""Numbers to terminal tables and self-contained pages. Draws, never computes; no torch."""

"""How a proof is made: what is run, what is measured, and how it is judged."""

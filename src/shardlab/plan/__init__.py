"""What strategies cost, as formulas: what is claimed before anything is measured."""

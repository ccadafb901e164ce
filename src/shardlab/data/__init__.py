"""Where samples come from: pure functions of (seed, epoch, position, rank), and files."""

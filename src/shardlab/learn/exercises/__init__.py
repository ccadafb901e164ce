"""One folder per exercise: README, picture, template, solution, hints, checks."""

"""What is timed, what is weighed, and how."""

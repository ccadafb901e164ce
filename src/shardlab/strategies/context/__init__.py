"""Context parallelism: the ranks share each sequence."""

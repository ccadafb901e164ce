"""Tensor and sequence parallelism: the ranks share each layer."""

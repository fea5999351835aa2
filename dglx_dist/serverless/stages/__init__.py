"""Tensor stages in NumPy, as workers run them."""

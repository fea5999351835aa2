"""Tensor stages that workers run, in NumPy."""

"""Keyed random numbers, and the kernels that draw in-edges with them: the same draws on any rank."""

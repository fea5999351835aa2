"""Bytes and memory of an epoch under each strategy, one module per strategy."""

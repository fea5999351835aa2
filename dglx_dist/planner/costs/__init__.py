"""Bytes and memory per epoch under each strategy, one module per strategy."""

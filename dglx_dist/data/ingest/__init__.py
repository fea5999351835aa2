"""Read tables larger than memory into a dataset."""

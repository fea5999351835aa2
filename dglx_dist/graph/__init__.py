"""The partitioned graph as a program sees it: structure, tensors, ownership and splits."""

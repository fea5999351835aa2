"""The partitioned graph: structure, tensors, ownership and splits."""

"""Partitioned datasets on disk: writing, memory-mapped reading, and DGL's own format."""

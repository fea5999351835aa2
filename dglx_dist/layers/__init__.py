"""How a convolution splits into stages: P3's partition, transform, scatter, gather, sync, apply (P-TAGS)."""

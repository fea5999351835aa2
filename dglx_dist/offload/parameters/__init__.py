"""Weights on servers: versions, stashes, updates (Dorylus, section 5)."""

"""What the resident ranks of a bench can be asked to do."""

"""Jobs that the resident ranks of a bench can run."""

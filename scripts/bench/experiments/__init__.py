"""Tables of experiments: a module for each family, ``EXPERIMENTS`` in it."""

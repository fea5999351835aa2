import dglx_dist  # noqa: F401 - before any import of DGL, of which 2.0 to 2.3 need it

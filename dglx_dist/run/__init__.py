"""Composition: the only room that knows all others, for scripts (``dx.init`` ...) and the command line."""

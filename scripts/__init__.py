"""Tools for developers: the bench, emulated servers, and shell scripts."""

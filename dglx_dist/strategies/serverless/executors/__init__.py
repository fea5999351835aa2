"""Executors: local processes, HTTP, AWS and inline."""

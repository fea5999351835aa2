"""For tools that look for this file. The metadata is in pyproject.toml."""

from setuptools import setup

setup()

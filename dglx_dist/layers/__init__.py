"""Convolutions split into stages."""

"""Partitioners: one owner for every node."""

"""Experiments: what a paper claims, what is predicted here, and what was measured side by side."""

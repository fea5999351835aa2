"""What ``scripts/bench/distdgl.py`` is made of: emulated machines, the cases, and the ranks of each system."""

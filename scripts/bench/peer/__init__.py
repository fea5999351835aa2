"""The parts of ``scripts/bench/distdgl.py``: emulated machines, the cases, the ranks of each system."""

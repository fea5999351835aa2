"""Emulated servers on one machine, with slow links between them, and commands run on them under torchrun."""

"""``dglx`` as ``python -m dglx_dist.cli``."""

from dglx_dist.cli import main

main()

"""``dglx`` as ``python -m dglx_dist.cli``."""

from __future__ import annotations

from dglx_dist.cli import main

main()

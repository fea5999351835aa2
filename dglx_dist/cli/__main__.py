"""``python -m dglx_dist.cli`` is ``dglx``."""

from __future__ import annotations

from dglx_dist.cli import main

main()

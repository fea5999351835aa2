"""``python -m dglx_dist.cli`` is ``dglx``."""

from dglx_dist.cli import main

main()

"""``dgl.distributed`` on this package's engine: ``install()``, and scripts written for DistDGL run."""

from dglx_dist.compat.namespace import install as install

__all__ = ["install"]

"""``dgl.distributed`` on this package's engine: ``install()``, and scripts written for DistDGL run."""

from dglx_dist.compat.install import install as install

__all__ = ["install"]

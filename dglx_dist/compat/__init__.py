"""Drop-in replacement of ``dgl.distributed``. :func:`install` activates it."""

from dglx_dist.compat.namespace import install as install

__all__ = ["install"]

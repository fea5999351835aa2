"""Drop-in replacement for ``dgl.distributed``. :func:`install` activates it."""

from dglx_dist.compat.namespace import install as install

__all__ = ["install"]

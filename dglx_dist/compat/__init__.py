"""Drop-in replacement of ``dgl.distributed``; :func:`install` puts it in place."""

from dglx_dist.compat.namespace import install as install

__all__ = ["install"]

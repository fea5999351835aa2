"""A graph server of stock ``dgl.distributed``: never returns from ``initialize``."""

from __future__ import annotations

import os

import dgl.distributed

dgl.distributed.initialize(os.environ["DGL_IP_CONFIG"], net_type="socket")

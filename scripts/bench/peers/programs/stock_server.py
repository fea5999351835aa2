"""A graph server of stock ``dgl.distributed``, which serves until all trainers have left."""

from __future__ import annotations

import sys

import dgl.distributed


def main() -> None:
    """Serve; DGL reads its part and its number from the environment."""
    dgl.distributed.initialize(sys.argv[1], net_type="socket")


if __name__ == "__main__":
    main()

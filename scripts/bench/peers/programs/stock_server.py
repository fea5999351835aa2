"""A graph server of stock ``dgl.distributed``, which serves until all trainers have left."""

from __future__ import annotations

import argparse

import dgl.distributed


def main() -> None:
    """Serve; DGL reads its part and its number from the environment."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ip-config", required=True)
    dgl.distributed.initialize(parser.parse_args().ip_config, net_type="socket")


if __name__ == "__main__":
    main()

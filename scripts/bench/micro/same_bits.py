"""Digests of weights, losses and counted bytes of every strategy: equal before and after a refactoring.

python scripts/bench same_bits                     this checkout
python scripts/bench same_bits --root OTHER        another checkout, with the same Python
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

from scripts.bench.micro.timing import dglx, parser

GRAPH = "synthetic:nodes=2000,degree=10,classes=5,features=24,seed=3"
RUNS: dict[str, tuple[str, ...]] = {
    "data_parallel sage": ("data_parallel", "--fanout", "10,5", "--batch-size", "256"),
    "data_parallel gat": ("data_parallel", "--fanout", "10,5", "--batch-size", "256", "--model", "gat"),
    "push_pull sage": ("push_pull", "--fanout", "10,5", "--batch-size", "256"),
    "push_pull gcn, depth 3": ("push_pull", "--fanout", "10,5", "--model", "gcn", "--option", "depth=3"),
    "full_graph sage": ("full_graph",),
    "full_graph gat": ("full_graph", "--model", "gat"),
    "shared_preload gcn": ("shared_preload", "--model", "gcn"),
    "cooperative sage": ("cooperative", "--batch-size", "256"),
    # One task at a time: sums in another order have other last bits.
    "lambda gcn": ("lambda", "--model", "gcn", "--dropout", "0", "--option", "intervals=1"),
}
EPOCHS = "3"
LAUNCH = ("--ranks", "2", "--servers", "2", "--seed", "1", "--epochs", EPOCHS, "--checkpoint-every", EPOCHS)


def main(argv: list[str]) -> None:
    """Print one line per run: its name, and digests of weights, losses and bytes."""
    options = parser("same_bits", __doc__)
    options.add_argument("--root", type=Path, default=Path(__file__).parents[3], help="the checkout to run")
    options.add_argument("--only", default="", help="runs whose names begin so")
    chosen = options.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        # With the package of that checkout.
        how_run: Any = {
            "folder": folder,
            "environment": {"PYTHONPATH": str(chosen.root), "OMP_NUM_THREADS": "1"},
        }
        dglx("partition", GRAPH, "--parts", 2, "--method", "hash", "--out", "data", **how_run)
        for name, how in RUNS.items():
            if name.startswith(chosen.only):
                dglx("train", "data", "--strategy", *how, *LAUNCH, "--out", f"run-{name}", **how_run)
                print(f"{name:<24} {digest_of(folder / f'run-{name}')}", flush=True)


def digest_of(run: Path) -> str:
    """Return digests of the checkpoint's tensors, the losses of all epochs, and the bytes of all epochs."""
    weights = hashlib.sha256()
    for state in sorted((run / "checkpoints").glob("*/state.json")):
        # By name: which rank writes a tensor is no result.
        for name, saved in sorted(json.loads(state.read_text())["tensors"].items()):
            raw = (state.parent / saved["file"]).read_bytes()[saved["first_byte"] :][: saved["num_bytes"]]
            weights.update(name.encode() + raw)
    epochs = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [epoch["loss"] for epoch in epochs]
    counted = [[epoch["bytes_inside"], epoch["bytes_outside"]] for epoch in epochs]
    return f"weights {weights.hexdigest()[:16]} losses {losses} bytes {counted}"

"""Training beside stock ``dgl.distributed``: same partition, model, fan-outs, batches, network and cores.

    python scripts/bench/distdgl.py --case small-model --work runs/bench-small --json small.json

Two emulated machines (Linux namespaces, root needed) with one trainer and one core each, joined by a wire.
Stock DGL has a graph server and a trainer per machine, ours one rank; both are started by torchrun, in turn,
``--launches`` times for ``--epochs`` measured epochs after one that warms up. Epoch seconds are those of the
slowest rank between two barriers; peak memory of a machine counts shared pages once. Machines end with this
script, however it ends.

``--allocator unset`` leaves both systems as a user of torchrun finds them (ours then keeps freed memory);
``glibc`` gives both the C library's defaults; ``tuned`` gives both the settings of ``dglx train``.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from pathlib import Path

from peer.cases import CASES, prepare, quick
from peer.launch import Launch, Plan, allocators, launch
from peer.machines import what_is_missing
from peer.table import figures, text

WARM_UP = 1


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--case", choices=sorted(CASES), default="small-model")
    parser.add_argument("--quick", action="store_true", help="a tiny graph, to see that everything runs")
    parser.add_argument("--launches", type=int, default=3, help="of each system, in turn")
    parser.add_argument("--epochs", type=int, default=2, help="measured epochs of each launch")
    parser.add_argument(
        "--systems", default="", help="which, e.g. stock,ours; ddp: dense embeddings under DDP"
    )
    parser.add_argument("--allocator", choices=sorted(allocators()), default="unset")
    parser.add_argument("--rate", help="most that a machine sends, as tc has it, e.g. 1gbit")
    parser.add_argument("--cache", type=float, default=0.0, help="ours: cache of the 1-hop halo, as alpha")
    parser.add_argument("--work", type=Path, help="keep the written graph here and take it from here")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for one launch")
    return parser.parse_args()


def compare(options: argparse.Namespace, scratch: Path) -> list[Launch]:
    """Run all launches in turn and return them."""
    case = quick(CASES[options.case]) if options.quick else CASES[options.case]
    written = prepare(case, options.work or scratch / "data")
    print(f"{options.case}: {case}\nedge cut {written.edge_cut:.3f}", flush=True)
    plan = Plan(
        case=case,
        written=written,
        epochs=options.epochs + WARM_UP,
        rate=options.rate,
        allocator=options.allocator,
        timeout_s=options.timeout,
        options={"cache": options.cache},
        scratch=scratch,
    )
    usual = "stock,ours,ddp" if case.embedding else "stock,ours"
    done = []
    for number in range(options.launches):
        for system in (options.systems or usual).split(","):
            done.append(launch(system, plan, number))
            print(f"{number} " + text([figures(system, done[-1:], WARM_UP)]).splitlines()[0], flush=True)
    return done


def main() -> None:
    options = read_options()
    missing = what_is_missing(options.rate)
    if missing:
        raise SystemExit(f"cannot emulate machines: {missing}")
    # So that the folder goes too; the machines end in any case.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory(prefix="dglx-bench-") as scratch:
        done = compare(options, Path(scratch))
    rows = [figures(system, done, WARM_UP) for system in dict.fromkeys(each.system for each in done)]
    print("\n" + text(rows))
    if options.json:
        told = {name: str(value) for name, value in vars(options).items()}
        options.json.write_text(json.dumps({"options": told, "systems": rows}, indent=1))


if __name__ == "__main__":
    main()

"""Partial sums of activations: groups of replicas, equal weights, exact bytes."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unittest import mock

import torch

from dglx_dist.comm.codec import WireDtype, wire_bytes
from dglx_dist.comm.exchange import DEVICES, DeviceExchange
from dglx_dist.comm.session import start_session
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.strategies.base import STRATEGIES
from dglx_dist.strategies.push_pull import exchange
from dglx_dist.strategies.push_pull.exchange import BACKWARD, FORWARD, STRUCTURE
from tests.helpers.ranks import run_ranks
from tests.strategies import equality
from tests.strategies.push_pull import runs
from tests.strategies.push_pull.runs import EPOCHS, Notes, Run
from tests.strategies.test_equality import difference

RANKS, SIZES = 4, (4, 2, 1)
RUNS = {
    "sage": Run("sage", {}, share="uneven"),
    "gat": Run("gat", {}, share="uneven"),
    "late": Run("gat", {"depth": 3}, share="uneven"),
}
ON_ACCELERATORS = [("late", 4), ("sage", 2)]
FEATURE_BYTES = equality.NUM_NODES * equality.WIDTH * 8


def with_size(run: Run, size: int) -> Run:
    return replace(run, options={**run.options, "group_size": size, "structure": "push"})


def on_accelerators(g: DistGraph, name: str, size: int, *, each_has_one: bool) -> Notes:
    """Train with rows on each rank's own accelerator, or on a shared one. Gloo and the CPU replace them."""
    direct = DeviceExchange(g.session, torch.device("cpu")) if each_has_one else None
    before = DEVICES.get(g.session)
    with (
        mock.patch.object(exchange, "is_on_host", return_value=False),
        mock.patch.object(exchange, "copy_to_host", wraps=exchange.copy_to_host) as copied,
    ):
        DEVICES.set(g.session, direct)
        notes = runs.train(g, with_size(RUNS[name], size))
    DEVICES.set(g.session, before)
    assert (direct is not None and direct.waited_s > 0, copied.called) == (each_has_one, not each_has_one)
    return notes


def on_rank(folder: str) -> dict[str, Any]:
    with start_session(timeout_s=60):
        g = DistGraph(folder)
        results: dict[str, Any] = {
            f"{name} {size}": runs.train(g, with_size(run, size))
            for name, run in RUNS.items()
            for size in SIZES
        }
        for name, size in ON_ACCELERATORS:
            for each_has_one in (True, False):
                notes = on_accelerators(g, name, size, each_has_one=each_has_one)
                results[f"{name} {size}, accelerators, {each_has_one}"] = notes
        results["chosen"] = {memory: chosen_size(g, memory) for memory in ("28000", "27KB", "14000", "7000")}
        g.barrier()
        return results


WIRES: dict[str, float] = {"bfloat16": 0.02, "int8": 0.1, "int4": 1.0}
"""By how much weights may differ from those of an exact run."""


def narrow_on_rank(folder: str) -> dict[str, Notes]:
    with start_session(timeout_s=60):
        g = DistGraph(folder)
        runs_of = {wire: replace(RUNS["sage"], options={"wire_dtype": wire}) for wire in WIRES}
        results = {wire: runs.train(g, run) for wire, run in runs_of.items()}
        results["again"], results["same"] = runs.train(g, runs_of["int8"]), runs.train(g, RUNS["sage"])
        g.barrier()
        return results


def test_activations_in_fewer_bits_are_close_and_repeat(folder: Path) -> None:
    results = run_ranks(narrow_on_rank, 2, args=(str(folder),), ranks_per_server=1)
    rows = sum(result["same"].moved["D1"] for result in results)
    for wire, most in WIRES.items():
        for phase in (FORWARD, BACKWARD):
            num_bytes = sum(result[wire].moved[phase] for result in results)
            assert num_bytes == rows * wire_bytes(cast("WireDtype", wire), equality.HIDDEN, 8)
        for result in results:
            assert 0 < difference(result[wire].weights, result["same"].weights) < most, wire
    for result in results:
        assert difference(result["again"].weights, result["int8"].weights) == 0


def chosen_size(g: DistGraph, memory: str) -> int:
    model: Any = (
        STRATEGIES.get("push_pull")(g.session, {"memory": memory}).open(g).wrap(runs.first_model("sage"))
    )
    size: int = model._group.size
    return size


def test_groups_leave_the_weights_of_one_process_and_move_less(folder: Path) -> None:
    results = run_ranks(on_rank, RANKS, args=(str(folder),), ranks_per_server=2)
    for name, run in RUNS.items():
        for size in SIZES:
            notes: list[Notes] = [result[f"{name} {size}"] for result in results]
            loss = runs.plain_loss(runs.of_all_ranks(notes))
            plain = runs.simulate(run, notes[0].log, runs.first_model(run.kind), loss)
            for note in notes:
                assert difference(note.weights, plain) <= 1e-10, (name, size)
        check_bytes(name, {size: [result[f"{name} {size}"] for result in results] for size in SIZES})
    for name, size in ON_ACCELERATORS:
        for result in results:
            plain = result[f"{name} {size}"]
            for each_has_one in (True, False):
                note = result[f"{name} {size}, accelerators, {each_has_one}"]
                assert difference(note.weights, plain.weights) == 0, (name, size, each_has_one)
                assert note.moved == plain.moved, (name, size, each_has_one)
                assert note.left == plain.left
    # 27 KB are 27648 bytes, and all features take 28000.
    assert FEATURE_BYTES == 28000
    assert results[0]["chosen"] == {"28000": 1, "27KB": 2, "14000": 2, "7000": 4}


def check_bytes(name: str, by_size: dict[int, list[Notes]]) -> None:
    """docs/strategies/push_pull.md, "When it pays", with int32 structure; and what replicas add up."""
    total = {size: sum((note.moved for note in notes), Counter()) for size, notes in by_size.items()}
    for size in SIZES:
        for phase in (FORWARD, BACKWARD):
            assert total[size][phase] * (RANKS - 1) == total[RANKS][phase] * (size - 1)
    everyone, steps = total[RANKS], EPOCHS * runs.STEPS
    activations = everyone["D1"] * equality.HIDDEN
    if RUNS[name].kind == "gat":
        # Two heads' logits of sources and destinations: summed at the owner and handed to the parts.
        activations += 2 * (everyone["L0"] + everyone["D1"]) * 2
    assert everyone[FORWARD] == everyone[BACKWARD] == (RANKS - 1) * activations * 8
    values = everyone["L0"] + everyone["D1"] + steps * RANKS + everyone["E1"]
    assert everyone[STRUCTURE] == (RANKS - 1) * 4 * values
    assert everyone["features"] == everyone["columns"] == 0
    matrices = {"sage": 2, "gat": 1}[RUNS[name].kind]
    cut_bytes = matrices * equality.HIDDEN * equality.WIDTH * 8
    for size in SIZES:
        # A ring over n ranks sends 2 (n - 1) times its bytes in all.
        replicas = RANKS // size
        added = steps * 2 * (replicas - 1) * cut_bytes
        assert total[size]["gradients"] == total[RANKS]["gradients"] + added

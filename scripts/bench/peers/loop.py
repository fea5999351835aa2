"""Code that the programs of all systems share: arguments, clock, report, loss, counts and model."""

from __future__ import annotations

import json
import sys
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dglx_dist.memory import peak_bytes
from scripts.bench.peers.workload import TOLD, Launch, Workload
from scripts.json_records import read_record
from scripts.netlab.servers import read_card
from scripts.out_files import write_text


@dataclass(frozen=True, kw_only=True)
class LaunchArguments:
    """Arguments that a launch passes to its ranks."""

    launch: Launch
    device: str | None
    """This server's network card; None: its bytes are not known."""
    ip_config: str
    """DGL's file of servers."""
    out: str = ""
    """Folder of the reports."""


def read_arguments() -> LaunchArguments:
    """Read what the launch told this rank in the folder that is its one argument."""
    value = json.loads((Path(sys.argv[1]) / TOLD).read_text())
    arguments: LaunchArguments = read_record(LaunchArguments, {**value, "out": sys.argv[1]})
    return arguments


class Clock:
    """Seconds by part of the loop, and what else an epoch counts."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.counts: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def of(self, part: str) -> Iterator[None]:
        """Add the time of the body to ``part``."""
        begin = time.perf_counter()
        yield
        self.add(part, time.perf_counter() - begin)

    def add(self, part: str, seconds: float) -> None:
        self.seconds[part] += seconds

    def count(self, name: str, value: float) -> None:
        self.counts[name] += value


class Trainer(ABC):
    """One rank on its share of the training nodes: every system's loop, its parts told apart by a clock."""

    sampled = "wait"
    """Name of the phase that ``next(loader)`` belongs to."""
    loader: Any
    model: Any
    optimizers: Sequence[Any]
    sparse: Any = None
    """The optimiser of trainable rows."""

    @property
    def num_steps(self) -> int:
        """Number of steps of an epoch."""
        return len(self.loader)

    @abstractmethod
    def inputs(self, batch: Any, clock: Clock) -> tuple[tuple[Any, ...], Tensor]:
        """Return the arguments of the model, and the labels; what has to be read for them is "pull"."""

    def clear(self) -> None:
        """Drop the gradients of the step before."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def note(self, clock: Clock, batch: Any) -> None:
        """Count what one batch of DGL's blocks holds; the sum of its seeds tells which seeds an epoch had."""
        input_nodes, seeds, blocks = batch
        clock.count("input_rows", len(input_nodes))
        clock.count("edges", sum(block.num_edges() for block in blocks))
        clock.count("seed_sum", int(seeds.sum()))

    def validate(self, epoch: int) -> tuple[float, int] | None:
        """Return this rank's hits among its validation nodes, and their number; None: not after ``epoch``."""
        return None

    def epoch(self, clock: Clock) -> None:
        """Train one epoch."""
        batches = iter(self.loader)
        for _ in range(self.num_steps):
            with clock.of(self.sampled):
                batch = next(batches)
            arguments, labels = self.inputs(batch, clock)
            with clock.of("forward"):
                scores = self.model(*arguments)
                loss = nn.functional.cross_entropy(scores, labels)
            with clock.of("backward"):
                self.clear()
                loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it bare
            with clock.of("update"):
                for optimizer in self.optimizers:
                    optimizer.step()
            if self.sparse is not None:
                with clock.of("sparse update"):
                    self.sparse.step()
            clock.count("loss_sum", float(loss.detach()) * len(labels))
            clock.count("correct", float((scores.detach().argmax(1) == labels).sum()))
            clock.count("targets", len(labels))
            self.note(clock, batch)


def train(trainer: Trainer, arguments: LaunchArguments) -> None:
    """Train, each epoch between two barriers of all ranks, and write what this rank measured."""
    epochs: list[dict[str, Any]] = []
    for number in range(1, arguments.launch.warmup + arguments.launch.epochs + 1):
        clock = Clock()
        dist.barrier()
        sent, begin = _read_sent_bytes(arguments.device), time.perf_counter()
        trainer.epoch(clock)
        dist.barrier()
        seconds, after = time.perf_counter() - begin, _read_sent_bytes(arguments.device)
        measured = {"epoch": number - 1, "seconds": seconds, "parts": clock.seconds, "counts": clock.counts}
        measured["card_sent"] = None if sent is None or after is None else after - sent
        if (validation := trainer.validate(number)) is not None:
            measured["validation"] = validation
        epochs.append(measured)
    report = {"epochs": epochs, "peak_bytes": peak_bytes()}
    write_text(Path(arguments.out) / f"rank-{dist.get_rank()}.json", json.dumps(report))


def _read_sent_bytes(device: str | None) -> int | None:
    return None if device is None else read_card(device).sent


class Sage(nn.Module):
    """GraphSAGE with the mean of the neighbours, on unchanged ``dgl.nn``."""

    def __init__(self, workload: Workload) -> None:
        # Only here: PyG's trainer does without DGL.
        import dgl

        super().__init__()
        hops = len(workload.fanouts)
        first = workload.embedding or workload.features
        widths = [first, *[workload.hidden] * (hops - 1), workload.classes]
        self.layers = nn.ModuleList(dgl.nn.SAGEConv(a, b, "mean") for a, b in pairwise(widths))

    def forward(self, blocks: list[Any], h: Tensor) -> Tensor:
        """Map the rows of the first block's sources to (B, classes) scores of the last one's destinations."""
        for number, (layer, block) in enumerate(zip(self.layers, blocks, strict=True)):
            h = layer(block, h)
            if number < len(self.layers) - 1:
                h = torch.relu(h)
        return h


def initial(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return first rows of an embedding; stock DGL's servers find this by the name of its module."""
    return torch.empty(shape, dtype=dtype).uniform_(-0.1, 0.1)

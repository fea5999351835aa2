"""What the ranks of both systems share: the model, the clock, and the report of a rank."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import dgl
import torch
from torch import Tensor, nn

from peer.cases import Case
from peer.machines import bytes_sent, machine_seconds, peak_resident


class Sage(nn.Module):
    """GraphSAGE with the mean of the neighbours, on unchanged ``dgl.nn``."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        hops = len(case.fanouts)
        widths = [case.embedding or case.features, *[case.hidden] * (hops - 1), case.classes]
        self.layers = nn.ModuleList(dgl.nn.SAGEConv(a, b, "mean") for a, b in pairwise(widths))

    def forward(self, blocks: list[Any], h: Tensor) -> Tensor:
        """Map the rows of the first block's sources to scores of the last one's destinations."""
        for number, (layer, block) in enumerate(zip(self.layers, blocks, strict=True)):
            h = layer(block, h)
            if number < len(self.layers) - 1:
                h = torch.relu(h)
        return h


class Clock:
    """Seconds by name, and what else an epoch counts."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.counts: dict[str, float] = {}

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Add the time of the body to ``name``."""
        begin = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin

    def count(self, name: str, value: float) -> None:
        """Add ``value`` to ``name``."""
        self.counts[name] = self.counts.get(name, 0.0) + value


class Report:
    """The epochs of one rank, written to a file at the end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._epochs: list[dict[str, Any]] = []

    @contextmanager
    def epoch(self, barrier: Any) -> Iterator[Clock]:
        """Measure one epoch between two barriers of all ranks."""
        clock = Clock()
        barrier()
        sent, begin, busy = bytes_sent(), time.perf_counter(), machine_seconds()
        yield clock
        barrier()
        row = {
            "seconds": time.perf_counter() - begin,
            "cpu": machine_seconds() - busy,
            "wire_bytes": bytes_sent() - sent,
        }
        self._epochs.append({**row, "parts": clock.seconds, **clock.counts})

    def write(self) -> None:
        """Write everything; called once, at the end."""
        self._path.write_text(json.dumps({"epochs": self._epochs, "peak_rss": peak_resident()}))


def loss_of(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the mean loss."""
    return nn.functional.cross_entropy(scores, labels)


def initial(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return first rows of an embedding; stock DGL's servers find this by the name of its module."""
    return torch.empty(shape, dtype=dtype).uniform_(-0.1, 0.1)


def read_arguments() -> tuple[argparse.Namespace, Case]:
    """Read what the bench told this rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--options", default="{}")
    arguments = parser.parse_args()
    fields = json.loads(arguments.case)
    return arguments, Case(**{**fields, "fanouts": tuple(fields["fanouts"])})

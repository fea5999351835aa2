"""Tests of the device that each rank takes, of the backend, and of devices that are refused on all ranks.

``count_gpus`` and ``use_gpu`` are replaced, and the code above them runs. No GPU is needed.
"""

import logging
import os
import re
from typing import Any
from unittest import mock

import pytest
import torch

from dglx_dist.comm import devices
from dglx_dist.comm.collectives import gather_json
from dglx_dist.comm.devices import RankDevice, check_device, choose_backend, describe, take_device
from dglx_dist.comm.session import start_session
from dglx_dist.dataloading.step_loader import read_loader_options
from dglx_dist.errors import ConfigError
from tests.helpers import refusal
from tests.helpers.ranks import start_ranks

NCCL = "cpu:gloo,cuda:nccl"
NO_GPU = RankDevice(why="torch 9 is built without CUDA")


def gpus(*cards: str) -> list[RankDevice]:
    return [RankDevice(name=f"cuda:{card[-1]}", card=card) for card in cards]


@pytest.mark.parametrize(
    ("ranks", "hosts", "backend", "line"),
    [
        (gpus("a0", "a1", "a2"), "aaa", NCCL, "3 ranks, cuda:0 to cuda:2, NCCL"),
        (gpus("a0", "b0"), "ab", NCCL, "2 ranks on 2 machines, cuda:0, NCCL"),
        (
            gpus("a0", "a0"),
            "aa",
            "gloo",
            "2 ranks share cuda:0: rows go through host memory by gloo",
        ),
        (
            gpus("a0", "a1", "a0", "a1"),
            "aaaa",
            "gloo",
            "4 ranks share cuda:0 to cuda:1: rows go through host memory by gloo",
        ),
        (gpus("a1"), "a", NCCL, "1 rank, cuda:1"),
        ([NO_GPU] * 2, "aa", "gloo", "2 ranks, cpu, gloo: torch 9 is built without CUDA"),
        ([RankDevice()], "a", "gloo", "1 rank, cpu"),
    ],
)
def test_nccl_needs_a_gpu_for_each_rank(ranks: list[RankDevice], hosts: str, backend: str, line: str) -> None:
    with mock.patch.object(devices.dist, "is_nccl_available", return_value=True):
        assert choose_backend(ranks, list(hosts), None) == backend
        assert describe(ranks, list(hosts), backend) == line
    with mock.patch.object(devices.dist, "is_nccl_available", return_value=False):
        assert choose_backend(ranks, list(hosts), None) == "gloo"


@pytest.mark.parametrize(
    ("ranks", "backend", "message"),
    [
        (
            [*gpus("a0"), NO_GPU],
            None,
            r"rank 0 on a has cuda:0, rank 1 on b has the CPU \(torch 9 is.* to all",
        ),
        (
            [RankDevice(), *gpus("b0")],
            None,
            r"rank 1 on b has cuda:0, rank 0 on a has the CPU \(as requested",
        ),
        ([NO_GPU, RankDevice(problem="no such")], None, "rank 1 on b: no such"),
        (gpus("a0", "a0"), "nccl", "ranks share a GPU, which NCCL does not support. Leave backend out"),
    ],
)
def test_names_ranks_that_cannot_train(ranks: list[RankDevice], backend: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        choose_backend(ranks, ["a", "b"], backend)
    assert choose_backend(gpus("a0", "a1"), ["a", "a"], "nccl") == "nccl"


@pytest.mark.parametrize(
    ("device", "count", "name", "message"),
    [
        ("auto", 0, "cpu", "finds no GPU|without CUDA"),
        ("auto", 2, "cuda:1", ""),
        ("cuda", 2, "cuda:1", ""),
        ("cuda", 1, "cuda:0", ""),
        ("cuda:0", 2, "cuda:0", ""),
        (torch.device("cpu"), 2, "cpu", ""),
        ("cuda", 0, "", r"device='cuda', but torch .*. Use device='cpu', or 'auto'"),
        ("cuda:7", 2, "", "device='cuda:7', but this machine has cuda:0, cuda:1. Use one of them"),
        ("gpu", 2, "", "device='gpu' is not a device"),
        ("meta", 2, "", "device='meta': ranks train on GPUs or CPUs. Use auto, cuda or cpu"),
    ],
)
def test_a_rank_takes_the_gpu_of_its_number(device: Any, count: int, name: str, message: str) -> None:
    with (
        mock.patch.object(devices, "count_gpus", return_value=count),
        mock.patch.object(devices, "use_gpu", side_effect=lambda number: f"card {number}"),
    ):
        chosen = take_device(device, local_rank=3)
        assert (chosen.problem == "") == bool(name)
        assert chosen.name == (name or "cpu")
        assert chosen.card == (f"card {name[-1]}" if name.startswith("cuda") else "")
        # The same is refused to a loader, which may have other devices than a session.
        refused = refusal(lambda: read_loader_options({"device": device}), ConfigError)
        assert bool(refused) == (device == "auto" or (not name and device != "meta"))
    assert re.search(message, chosen.problem or chosen.why)


def test_a_gpu_that_cannot_compute_is_left_alone_or_an_error() -> None:
    """A driver or a card that torch's kernels are not made for fails like this."""
    with (
        mock.patch.object(devices, "count_gpus", return_value=1),
        mock.patch.object(devices, "use_gpu", side_effect=RuntimeError("no kernel image\nand more")),
    ):
        assert take_device("auto", 0) == RankDevice(why="cuda:0 cannot be used (no kernel image)")
        for request, name in (("cuda", "device"), ("auto", "DGLX_DEVICE")):
            message = f"{name}='cuda': cuda:0 cannot be used (no kernel image). See nvidia-smi"
            assert message in take_device(request, 0, "cuda").problem
        assert check_device("cuda:0") == torch.device("cuda", 0)


def _starting(device: str, counts: list[int]) -> list[Any]:
    """Start with as many GPUs as ``counts`` says of this rank; those of one number are one card."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dglx_dist.comm.session").addHandler(handler)
    with (
        mock.patch.object(devices, "count_gpus", return_value=counts[int(os.environ["RANK"])]),
        mock.patch.object(devices, "use_gpu", side_effect=lambda number: f"card {number}"),
        start_session(device=device, timeout_s=20) as session,
    ):
        return [
            str(session.device),
            session.ranks_of_device,
            gather_json(session.topology.rank, session),
            messages,
        ]


def test_two_ranks_share_a_gpu_by_gloo_and_rank_0_says_so() -> None:
    first, second = (result.result for result in start_ranks(_starting, 2, args=("auto", [1, 1])))
    assert first == [
        *("cuda:0", 2, [0, 1]),
        ["2 ranks share cuda:0: rows go through host memory by gloo"],
    ]
    assert second == [*first[:3], []]


@pytest.mark.parametrize(
    ("device", "counts", "message"),
    [
        (
            "auto",
            [1, 0],
            r"ranks have different devices: rank 0 on \S+ has cuda:0, rank 1 on \S+ has the CPU",
        ),
        ("cuda", [1, 0], r"rank 1 on \S+: device='cuda', but torch"),
    ],
)
def test_all_ranks_refuse_a_device_that_one_lacks(device: str, counts: list[int], message: str) -> None:
    for result in start_ranks(_starting, 2, args=(device, counts)):
        assert re.search(f"ConfigError: {message}", result.error), result.error


def test_the_environment_stands_for_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DGLX_DEVICE", "cuda:9")
    assert refusal(start_session, ConfigError).startswith("DGLX_DEVICE='cuda:9', but ")
    with start_session(device="cpu") as session:
        assert session.device.type == "cpu"

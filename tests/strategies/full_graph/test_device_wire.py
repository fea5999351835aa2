"""Which ranks talk from accelerator to accelerator; the messages themselves are in test_exchange.py."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from dglx_dist.comm.session import start_session
from dglx_dist.strategies.full_graph import halo_exchange
from dglx_dist.strategies.full_graph.halo_exchange import make_device_wire


@pytest.mark.parametrize(
    ("device", "backend", "cards", "direct"),
    [
        ("cpu", "cpu:gloo", ["", ""], False),
        ("cuda", "cpu:gloo,cuda:nccl", ["a", "b"], True),
        # NCCL refuses two ranks on one.
        ("cuda", "cpu:gloo,cuda:nccl", ["a", "a"], False),
        ("cuda", "cpu:gloo,cuda:nccl", ["a", ""], False),
        ("cuda", "cpu:gloo,cuda:gloo", ["", ""], False),
    ],
)
def test_only_ranks_with_an_accelerator_each(
    device: str, backend: str, cards: list[str], direct: bool
) -> None:
    gathered: list[str] = []

    def gather(uuid: str, _session: object) -> list[str]:
        gathered.append(uuid)
        return cards

    with (
        mock.patch.object(halo_exchange, "gather_json", gather),
        mock.patch.object(halo_exchange.dist, "is_initialized", return_value=True),
        mock.patch.object(halo_exchange.dist, "get_backend_config", return_value=backend),
        mock.patch.object(torch.cuda, "get_device_properties", return_value=SimpleNamespace(uuid="a")),
        mock.patch.object(halo_exchange, "DeviceWire") as wire,
    ):
        made = make_device_wire(SimpleNamespace(device=torch.device(device)))  # type: ignore[arg-type]
    assert gathered == [cards[0]]
    assert (made is not None) == direct
    assert wire.called == direct


def test_without_accelerators_there_is_none() -> None:
    with start_session() as session:
        assert make_device_wire(session) is None


def test_one_rank_with_an_accelerator_has_nobody_to_talk_to() -> None:
    with start_session() as session:
        session.device = torch.device("cuda", 0)
        assert make_device_wire(session) is None

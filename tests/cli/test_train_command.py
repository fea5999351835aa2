"""``dglx train``: what is refused before anything starts, and how ranks are started."""

import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dglx_dist.cli.train import check_before_launch, check_launched, start_ranks
from dglx_dist.data.partition.base import PartitionPlan
from dglx_dist.data.partition.prepare import partition_to_disk
from dglx_dist.errors import ConfigError, DglxError
from dglx_dist.graph.cache import POLICIES
from dglx_dist.records import EDGE_TYPE, NODE_TYPE
from dglx_dist.training.config import TrainConfig
from tests.api.graphs import two_triangles


@pytest.fixture(autouse=True)
def four_ranks_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DGLX_RANKS_PER_SERVER", raising=False)
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)


def test_ranks_and_servers_are_those_that_torchrun_started(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="--ranks 2, but torchrun has started 4"):
        check_launched(2, None)
    with pytest.raises(ConfigError, match=r"--servers 2, .* DGLX_RANKS_PER_SERVER"):
        check_launched(None, 2)
    check_launched(None, None)
    check_launched(4, 1)
    monkeypatch.setenv("DGLX_RANKS_PER_SERVER", "2")
    check_launched(4, 2)


def make_config(strategy: str, data: Path, **options: object) -> TrainConfig:
    return TrainConfig(data=str(data), strategy=strategy, ranks=2, servers=2, strategy_options=options)


def test_auto_starts_on_several_types_and_needs_features_of_one(tmp_path: Path) -> None:
    raw = two_triangles()
    partition_to_disk(raw, tmp_path / "one", PartitionPlan(num_parts=2, method="contiguous"))
    check_before_launch(make_config("auto", tmp_path / "one"))
    both = {EDGE_TYPE: raw.edges[EDGE_TYPE], (NODE_TYPE, "likes", NODE_TYPE): raw.edges[EDGE_TYPE]}
    partition_to_disk(
        replace(raw, edges=both), tmp_path / "two", PartitionPlan(num_parts=2, method="contiguous")
    )
    check_before_launch(make_config("auto", tmp_path / "two"))
    bare = replace(raw, node_data={NODE_TYPE: {}})
    partition_to_disk(bare, tmp_path / "bare", PartitionPlan(num_parts=2, method="contiguous"))
    with pytest.raises(ConfigError, match="no node data 'feat'"):
        check_before_launch(make_config("auto", tmp_path / "bare"))


@pytest.mark.parametrize(
    ("strategy", "options", "said"),
    [
        ("data_parallel", {"bucket_byte": 1}, "did you mean 'bucket_bytes'"),
        ("push_pull", {"dept": 2}, "did you mean 'depth'"),
        ("full_graph", {"use_p": True}, "did you mean 'use_pp'"),
        ("shared_preload", {"hops": -1}, "hops=-1"),
        ("cooperative", {"batches": "two"}, "must be of type int"),
        ("lambda", {"interval": 3}, "did you mean 'intervals'"),
        ("auto", {"unit": "graph"}, "unit='graph' must be mini_batch, full_graph or any"),
    ],
)
def test_refuses_wrong_options_of_strategies(strategy: str, options: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_before_launch(make_config(strategy, Path("nowhere"), **options))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"strategy": "data_paralel"}, r"did you mean 'data_parallel'\? \(known: auto, "),
        ({"ranks": 3, "servers": 3}, "has 2 parts, too few for --servers 3"),
        ({"strategy": "dorylus", "precision": "bf16"}, "'lambda' takes one step per epoch"),
    ],
)
def test_refuses_what_does_not_fit_before_ranks(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    partition_to_disk(two_triangles(), tmp_path / "two", PartitionPlan(num_parts=2, method="contiguous"))
    with pytest.raises(DglxError, match=said):
        check_before_launch(TrainConfig(**({"data": str(tmp_path / "two"), "ranks": 2} | options)))


def test_a_gpu_that_is_not_here_is_refused_before_ranks_start() -> None:
    with pytest.raises(ConfigError, match="device='cuda:9', but"):
        check_before_launch(TrainConfig(data="nowhere", ranks=2, device="cuda:9"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"layers": 0, "fanouts": ()}, "--layers 0"),
        ({"model": "gat", "hidden": 10, "heads": 4}, "--heads 4 must be a divisor of --hidden 10"),
        ({"lr": float("inf")}, "--lr inf"),
        ({"timeout_s": float("inf")}, "--timeout inf"),
        ({"seed": -1}, "--seed -1"),
        ({"eval_every": -1}, "--eval-every -1"),
        ({"patience": 0}, "--early-stop 0"),
        ({"metric": ("ndcg",)}, "--metric"),
        ({"patience": 2, "eval_every": 0}, "--early-stop 2 counts evaluations"),
        ({"depth": 0}, "--depth 0"),
        ({"model": "resgcn", "recompute": "all"}, "--recompute all must be none, exchange or keep"),
        ({"recompute": "keep"}, "--recompute keep must be left out with --model sage"),
        ({"loader_threads": -1}, "--loader-threads -1"),
        ({"layers": 1, "save_embeddings": "out"}, "--save-embeddings out must be left out with --layers 1"),
        ({"cache": "best"}, "--cache best must be lookahead, vip, degree or halo"),
        ({"cache": "vip", "cache_alpha": -0.1}, r"--cache-alpha -0\.1 must be at least 0"),
        ({"strategy_options": {"seed": 1}}, "--option seed"),
        ({"strategy_options": {"backend": "nccl"}}, "--option backend"),
        ({"strategy_options": {"device": "cpu"}}, "--option device"),
    ],
)
def test_what_cannot_run_is_refused_before_a_run_folder_is_touched(
    options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        TrainConfig(data="data", out="run", **options)


def test_the_cache_is_one_that_the_graph_knows() -> None:
    for policy in POLICIES:
        # Heads that do not divide the width matter to gat only.
        assert TrainConfig(data="d", out="o", cache=policy, hidden=10, heads=4).cache == policy


def test_a_killed_launcher_is_told_and_ends_as_in_a_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    killed, before = tmp_path / "python", [signal.getsignal(number) for number in numbers]
    monkeypatch.setenv("DGLX_PARENT", "")
    killed.write_text("#!/bin/sh\nkill -KILL $$\n")
    killed.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(killed))
    try:
        assert start_ranks(["train"], ranks=1, servers=None) == 128 + signal.SIGKILL
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
    assert "SIGKILL" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="--ranks 3 cannot be divided among --servers 2"):
        start_ranks(["train"], ranks=3, servers=2)

"""Embeddings and optimiser state in a folder, across numbers of ranks and servers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from dglx_dist.comm.session import start_session
from dglx_dist.comm.topology import Topology
from dglx_dist.data.storage.row_files import read_index, write_index
from dglx_dist.errors import StorageError
from dglx_dist.graph import optim
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.graph.embedding import DistEmbedding
from dglx_dist.records import NODE_TYPE
from tests.graph.small import NUM_NODES, build, write
from tests.graph.sparse_cases import DIM, KINDS, STEPS, embeddings, expected, make_optimizer, train
from tests.helpers.ranks import run_ranks


def train_and_save(folder: Path, saved: Path) -> dict[str, Any]:
    found = {}
    with start_session(seed=3):
        g = DistGraph(folder)
        for kind in KINDS:
            embed = embeddings(g, kind)
            found[kind] = [e.weight.to_local().tolist() for e in embed]
            optimizer = make_optimizer(kind, embed)
            g.barrier()
            train(g, embed, optimizer, range(2))
            optimizer.save(saved / kind)
            # Again into the same folder, now with what will be loaded.
            train(g, embed, optimizer, range(2, 4))
            optimizer.lr /= 2
            optimizer.save(saved / kind)
            g.barrier()
    return found


def load_elsewhere(folder: Path, saved: Path) -> dict[str, Any]:
    found = {}
    with start_session(seed=4):
        g = DistGraph(folder)
        for kind in KINDS:
            embed = embeddings(g, kind)
            optimizer = make_optimizer(kind, embed)
            optimizer.load(saved / kind)
            state = optimizer.local_state_dict()
            found[kind] = (
                [e.weight.to_local().tolist() for e in embed],
                [tensor.to_local().tolist() for e in embed for tensor in e.optm_state],
                [state["emb_states"][e.name]["steps"] for e in embed],
                optimizer.lr,
            )
            g.barrier()
    return found


def test_another_number_of_ranks_and_servers_goes_on_with_the_same_rows(
    small_dataset: Path, tmp_path: Path
) -> None:
    first = run_ranks(train_and_save, 3, args=(small_dataset, tmp_path), ranks_per_server=1)[0]
    loaded = run_ranks(load_elsewhere, 2, args=(small_dataset, tmp_path), ranks_per_server=2)
    alone = run_ranks(load_elsewhere, 1, args=(small_dataset, tmp_path))
    for kind, rate in zip(KINDS, (0.25, 0.05, 0.025), strict=True):
        rows, states, steps, lr = loaded[0][kind]
        assert (steps, lr) == ([4, 4], rate)
        wanted = expected(kind, [torch.tensor(r, dtype=torch.float64) for r in first[kind]], 3, steps=4)
        for mine, other in zip(rows, wanted, strict=True):
            torch.testing.assert_close(torch.tensor(mine, dtype=torch.float64), other, rtol=0, atol=1e-10)
        assert loaded[1][kind] == alone[0][kind] == (rows, states, steps, lr)
    assert sorted(os.listdir(tmp_path)) == sorted(KINDS)
    assert STEPS > 4
    assert DIM == 3


@pytest.fixture
def session() -> Any:
    with start_session(topology=Topology(0, 1, (0,))) as session:
        yield session


def test_what_was_saved_elsewhere_is_refused_and_changes_nothing(
    session: Any, small_dataset: Path, tmp_path: Path
) -> None:
    g = DistGraph(small_dataset)
    optimizer = optim.SparseAdagrad([DistEmbedding(NUM_NODES, 2, "e")], lr=0.1)
    optimizer.save(tmp_path / "saved")
    other = DistEmbedding(NUM_NODES, 3, "other")
    before = other.weight.to_local()
    with pytest.raises(StorageError, match="kind 'SparseAdagrad', this run has 'SparseAdam'"):
        optim.SparseAdam([other], lr=0.1).load(tmp_path / "saved")
    with pytest.raises(StorageError, match=r"embeddings .*'e'.* this optimiser has .*'other'"):
        optim.SparseAdagrad([other], lr=0.1).load(tmp_path / "saved")
    with pytest.raises(StorageError, match="nothing was saved there"):
        optimizer.load(tmp_path / "elsewhere")
    assert torch.equal(other.weight.to_local(), before)
    g.close()
    graph = build()
    graph.node_data[NODE_TYPE]["feat"][0] += 1
    write(graph, tmp_path / "changed")
    DistGraph(tmp_path / "changed")
    with pytest.raises(StorageError, match=r"saved with dataset .* use the dataset .* parts= is given"):
        optim.SparseAdagrad([DistEmbedding(NUM_NODES, 2, "e")], lr=0.1).load(tmp_path / "saved")


def test_damage_is_found_before_anything_is_changed(
    session: Any, small_dataset: Path, tmp_path: Path
) -> None:
    DistGraph(small_dataset)
    embedding = DistEmbedding(NUM_NODES, 2, "e")
    optimizer = optim.SparseAdagrad([embedding], lr=0.1)
    optimizer.save(tmp_path / "saved")
    embedding.weight[:] = 7.0
    (file,) = (tmp_path / "saved").glob("*sum*")
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.write_bytes(raw)
    with pytest.raises(StorageError, match="is damaged"):
        optimizer.load(tmp_path / "saved")
    assert bool((embedding.weight.to_local() == 7.0).all())


@pytest.mark.parametrize("wrong", [{"lr": "much"}, {"steps": ["2"]}, {"steps": "22"}])
def test_facts_that_make_no_sense_change_nothing(
    session: Any, small_dataset: Path, tmp_path: Path, wrong: dict[str, Any]
) -> None:
    DistGraph(small_dataset)
    embedding = DistEmbedding(NUM_NODES, 2, "e")
    optimizer = optim.SparseAdagrad([embedding], lr=0.1)
    optimizer.save(tmp_path / "saved")
    index = read_index(tmp_path / "saved")
    files = [file for tensor in index.tensors.values() for file in tensor.files]
    write_index(tmp_path / "saved", files, {**index.facts, **wrong})
    embedding.weight[:] = 7.0
    with pytest.raises(StorageError, match="is damaged"):
        optimizer.load(tmp_path / "saved")
    assert bool((embedding.weight.to_local() == 7.0).all())


def test_a_save_that_fails_leaves_the_earlier_one(
    session: Any, small_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dglx_dist.graph import sparse_state as sparse_files

    DistGraph(small_dataset)
    embedding = DistEmbedding(NUM_NODES, 2, "e")
    optimizer = optim.SparseSGD([embedding], lr=0.1)
    optimizer.save(tmp_path / "saved")
    kept = embedding.weight.to_local()
    embedding.weight[:] = 7.0

    def full(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(sparse_files, "write_rows", full)
        with pytest.raises(StorageError, match="No space left"):
            optimizer.save(tmp_path / "saved")
    assert os.listdir(tmp_path) == ["saved"]
    optimizer.load(tmp_path / "saved")
    assert torch.equal(embedding.weight.to_local(), kept)


def test_a_folder_of_something_else_is_not_replaced(
    session: Any, small_dataset: Path, tmp_path: Path
) -> None:
    DistGraph(small_dataset)
    optimizer = optim.SparseSGD([DistEmbedding(NUM_NODES, 2, "e")], lr=0.1)
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "thesis.tex").write_text("mine")
    with pytest.raises(StorageError, match=r"something else than saved rows, such as 'thesis\.tex'"):
        optimizer.save(tmp_path / "project")
    assert os.listdir(tmp_path / "project") == ["thesis.tex"]

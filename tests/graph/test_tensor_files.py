"""Tensors and optimizer state saved by some ranks and loaded by others."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dglx_dist.comm.session import start_session
from dglx_dist.data.storage.row_files import read_index, write_index
from dglx_dist.data.storage.writer import write_dataset
from dglx_dist.errors import ConfigError, StorageError
from dglx_dist.graph import optim
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.graph.dist_tensor import DistTensor
from dglx_dist.graph.embedding import DistEmbedding
from dglx_dist.records import NODE_TYPE, Assignment
from tests.graph.small import NUM_NODES, build, write
from tests.graph.sparse_cases import KINDS, embeddings, make_optimizer, train, train_in_torch
from tests.helpers import wide
from tests.helpers.ranks import run_ranks

TABLE = torch.arange(3.0 * NUM_NODES).reshape(NUM_NODES, 3).to(torch.bfloat16)


def save_all(dataset: Path, folder: Path) -> None:
    with start_session():
        g = DistGraph(dataset)
        tensor = g.new_tensor((NUM_NODES, 3), torch.bfloat16, "h")
        if g.rank() == 0:
            tensor.push(slice(None), TABLE, wait=False)
        tensor.save(folder / "h")
        relations = DistTensor((2,), torch.int64, "r", part_policy=g.new_policy("relations", 2))
        relations[:] = torch.tensor([5, 6])
        relations.save(folder / "r")
        g.ndata["feat"].save(folder / "feat")
        g.edata["weight"].save(folder / "weight")


def load_all(dataset: Path, folder: Path) -> None:
    with start_session():
        g = DistGraph(dataset)
        tensor = g.new_tensor((NUM_NODES, 3), torch.bfloat16, "another name")
        tensor.load(folder / "h")
        assert torch.equal(tensor.to_local(), TABLE)
        relations = DistTensor((2,), torch.int64, "r", part_policy=g.new_policy("relations again", 2))
        relations.load(folder / "r", "r")
        assert relations.to_local().tolist() == [5, 6]
        for name, saved in (("feat", g.ndata["feat"]), ("weight", g.edata["weight"])):
            copied = DistTensor(saved.shape, saved.dtype, f"{name} again", part_policy=saved.part_policy)
            copied.load(folder / name)
            assert torch.equal(copied.to_local(), saved.to_local())
        second = g.new_tensor((NUM_NODES, 3), torch.float32)
        with pytest.raises(
            StorageError, match=r"'h' as bfloat16 of shape \(40, 3\), but the tensor to fill is fl"
        ):
            second.load(folder / "h")


@pytest.mark.parametrize(
    ("writers", "readers"), [((1, None), (3, 2)), *wide(((3, 2), (1, None)), ((2, 1), (2, None)))]
)
def test_tensors_load_on_another_number_of_ranks(
    small_dataset: Path, tmp_path: Path, writers: tuple[int, int], readers: tuple[int, int]
) -> None:
    args = (small_dataset, tmp_path)
    run_ranks(save_all, writers[0], args=args, ranks_per_server=writers[1])
    assert sorted(os.listdir(tmp_path)) == ["feat", "h", "r", "weight"]
    assert len(read_index(tmp_path / "h").tensors["h"].files) == writers[0]
    run_ranks(load_all, readers[0], args=args, ranks_per_server=readers[1])


def load_damaged(dataset: Path, folder: Path) -> None:
    with start_session():
        g = DistGraph(dataset)
        tensor = g.new_tensor((NUM_NODES, 3), torch.bfloat16, "h")
        tensor[:] = 1
        g.barrier()
        with pytest.raises(StorageError, match="is damaged" if g.rank() else "^rank 1 on .* is damaged"):
            tensor.load(folder / "h")
        g.barrier()
        assert (tensor.to_local() == 1).all()


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def test_a_flipped_byte_in_the_share_of_one_rank_is_an_error_on_all_and_changes_nothing(
    small_dataset: Path, tmp_path: Path
) -> None:
    run_ranks(save_all, 2, args=(small_dataset, tmp_path), ranks_per_server=1)
    flip_a_byte(tmp_path / "h" / read_index(tmp_path / "h").tensors["h"].files[-1].path)
    run_ranks(load_damaged, 2, args=(small_dataset, tmp_path), ranks_per_server=1)


def test_rows_of_another_dataset_or_type_are_refused(graph: DistGraph, tmp_path: Path) -> None:
    graph.new_tensor((NUM_NODES,), torch.int64, "h").save(tmp_path / "h")
    part_of = {NODE_TYPE: (np.arange(NUM_NODES) % 3).astype(np.int32)}
    assignment = Assignment(num_parts=3, part_of=part_of, method="hand", seed=0)
    write_dataset(build(), assignment, tmp_path / "other")
    elsewhere = DistGraph(tmp_path / "other")
    with pytest.raises(StorageError, match=r"of the dataset .* which numbers rows differently"):
        elsewhere.new_tensor((NUM_NODES,), torch.int64, "h").load(tmp_path / "h")
    own = DistTensor((NUM_NODES,), torch.int64, "own", part_policy=graph.new_policy("rows", NUM_NODES))
    own.save(tmp_path / "own")
    policy = graph.get_node_partition_policy(NODE_TYPE)
    with pytest.raises(StorageError, match=r"of the policy 'own~rows', .* belongs to 'node~_N'"):
        DistTensor((NUM_NODES,), torch.int64, "x", part_policy=policy, graph=graph).load(tmp_path / "own")


def test_errors_name_files_that_cannot_be_loaded(graph: DistGraph, tmp_path: Path) -> None:
    tensor = graph.new_tensor((NUM_NODES,), torch.int64, "h")
    with pytest.raises(StorageError, match=r"has no index\.json: nothing was saved there"):
        tensor.load(tmp_path / "nowhere")
    tensor.save(tmp_path / "h")
    with pytest.raises(StorageError, match=r"has no tensor 'x' \(known: 'h'\)"):
        tensor.load(tmp_path / "h", "x")
    with pytest.raises(ConfigError, match="read-only"):
        graph.ndata["label"].load(tmp_path / "h")


def train_and_save(folder: Path, saved: Path) -> dict[str, Any]:
    results = {}
    with start_session(seed=3):
        g = DistGraph(folder)
        for kind in KINDS:
            embed = embeddings(g, kind)
            results[kind] = [e.weight.to_local().tolist() for e in embed]
            optimizer = make_optimizer(kind, embed)
            g.barrier()
            train(g, embed, optimizer, range(2))
            optimizer.save(saved / kind)
            # Again into the same folder, now with what will be loaded.
            train(g, embed, optimizer, range(2, 4))
            optimizer.lr /= 2
            optimizer.save(saved / kind)
            g.barrier()
    return results


def load_elsewhere(folder: Path, saved: Path) -> dict[str, Any]:
    results = {}
    with start_session(seed=4):
        g = DistGraph(folder)
        for kind in KINDS:
            embed = embeddings(g, kind)
            optimizer = make_optimizer(kind, embed)
            optimizer.load(saved / kind)
            state = optimizer.local_state_dict()
            results[kind] = (
                [e.weight.to_local().tolist() for e in embed],
                [tensor.to_local().tolist() for e in embed for tensor in e.optm_state],
                [state["emb_states"][e.name]["steps"] for e in embed],
                optimizer.lr,
            )
            g.barrier()
    return results


def test_other_numbers_of_ranks_and_servers_resume_the_same_rows(small_dataset: Path, tmp_path: Path) -> None:
    first = run_ranks(train_and_save, 3, args=(small_dataset, tmp_path), ranks_per_server=1)[0]
    loaded = run_ranks(load_elsewhere, 2, args=(small_dataset, tmp_path), ranks_per_server=2)
    alone = run_ranks(load_elsewhere, 1, args=(small_dataset, tmp_path))
    for kind, rate in zip(KINDS, (0.25, 0.05, 0.025), strict=True):
        rows, states, steps, lr = loaded[0][kind]
        assert (steps, lr) == ([4, 4], rate)
        target = train_in_torch(kind, [torch.tensor(r, dtype=torch.float64) for r in first[kind]], 3, steps=4)
        for row, second in zip(rows, target, strict=True):
            torch.testing.assert_close(torch.tensor(row, dtype=torch.float64), second, rtol=0, atol=1e-10)
        assert loaded[1][kind] == alone[0][kind] == (rows, states, steps, lr)
    assert sorted(os.listdir(tmp_path)) == sorted(KINDS)


def test_state_of_another_optimizer_is_refused_and_changes_nothing(graph: DistGraph, tmp_path: Path) -> None:
    optimizer = optim.SparseAdagrad([DistEmbedding(NUM_NODES, 2, "e")], lr=0.1)
    optimizer.save(tmp_path / "saved")
    embedding = DistEmbedding(NUM_NODES, 3, "other")
    before = embedding.weight.to_local()
    with pytest.raises(StorageError, match="kind 'SparseAdagrad', this run has 'SparseAdam'"):
        optim.SparseAdam([embedding], lr=0.1).load(tmp_path / "saved")
    with pytest.raises(StorageError, match=r"embeddings .*'e'.* this optimizer has .*'other'"):
        optim.SparseAdagrad([embedding], lr=0.1).load(tmp_path / "saved")
    with pytest.raises(StorageError, match="nothing was saved there"):
        optimizer.load(tmp_path / "elsewhere")
    assert torch.equal(embedding.weight.to_local(), before)
    graph.close()
    changed = build()
    changed.node_data[NODE_TYPE]["feat"][0] += 1
    write(changed, tmp_path / "changed")
    DistGraph(tmp_path / "changed")
    with pytest.raises(StorageError, match=r"has dataset .* Use the dataset .* parts= is given"):
        optim.SparseAdagrad([DistEmbedding(NUM_NODES, 2, "e")], lr=0.1).load(tmp_path / "saved")


@pytest.mark.parametrize("wrong", [{}, {"lr": "much"}, {"steps": ["2"]}, {"steps": "22"}])
def test_finds_damage_before_any_change(graph: DistGraph, tmp_path: Path, wrong: dict[str, Any]) -> None:
    """Wrong facts, or without any a flipped bit in the last file that is read."""
    embedding = DistEmbedding(NUM_NODES, 2, "e")
    optimizer = optim.SparseAdagrad([embedding], lr=0.1)
    optimizer.save(tmp_path / "saved")
    index = read_index(tmp_path / "saved")
    files = [file for tensor in index.tensors.values() for file in tensor.files]
    write_index(tmp_path / "saved", files, {**index.facts, **wrong})
    if not wrong:
        flip_a_byte(next((tmp_path / "saved").glob("*sum*")))
    embedding.weight[:] = 7.0
    with pytest.raises(StorageError, match="is damaged"):
        optimizer.load(tmp_path / "saved")
    assert bool((embedding.weight.to_local() == 7.0).all())

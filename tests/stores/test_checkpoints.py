"""Checkpoints are saved to an object store by ranks that share no disk, and loaded by any number of them."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dglx_dist as dx
from dglx_dist.errors import CheckpointError
from dglx_dist.training import checkpoint, checkpoint_store
from dglx_dist.training.checkpoint import CheckpointWriter, RunState
from tests.helpers.object_store import StandIn, answer
from tests.helpers.ranks import run_ranks
from tests.stores.test_training import ranks_environment


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def make_run(value: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model and an optimizer whose state depends on ``value``."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.full((2, 3), value)).sum().backward()
    optimizer.step()
    return model, optimizer


def use_own_cache() -> None:
    os.environ["DGLX_DATASET_CACHE"] += f"/{os.environ['RANK']}"


def save_two(folder: str) -> None:
    use_own_cache()
    with dx.init():
        for epoch in (1, 2):
            model, optimizer = make_run(float(epoch))
            checkpoint.save(folder, model=model, optimizer=optimizer, epoch=epoch, extra={"epoch": epoch})


def load_newest(folder: str) -> dict[str, Any]:
    use_own_cache()
    with dx.init():
        model, optimizer = make_run(7.0)
        extra = checkpoint.read_extra(folder)
        loaded = checkpoint.load(folder, model=model, optimizer=optimizer)
        weights = [tensor.tolist() for tensor in model.state_dict().values()]
        moments = [state["exp_avg"].tolist() for state in optimizer.state_dict()["state"].values()]
        return {"epoch": loaded.epoch, "extra": extra, "values": [weights, moments]}


@pytest.fixture
def address(store: StandIn, bucket: str, cache: Path) -> str:
    return f"s3://{bucket}/run/checkpoints"


def run(function: Any, world_size: int, *args: Any) -> list[Any]:
    return run_ranks(function, world_size, args=args, ranks_per_server=1, environment=ranks_environment())


def keys(store: StandIn, address: str) -> list[str]:
    bucket, _, prefix = address.removeprefix("s3://").partition("/")
    entries = store.client().list_objects_v2(Bucket=bucket, Prefix=prefix + "/").get("Contents", [])
    return sorted(entry["Key"].removeprefix(prefix + "/") for entry in entries)


def test_any_number_of_ranks_loads_what_two_saved(address: str, store: StandIn) -> None:
    run(save_two, 2, address)
    # Each rank uploaded its own tensors, and state.json came last.
    puts = [path.rpartition("/")[2] for method, path, _ in store.requests if method == "PUT"][-3:]
    assert sorted(name[:9] for name in puts[:2]) == ["tensors-0", "tensors-1"]
    assert puts[2] == "state.json"

    model, optimizer = make_run(2.0)
    moments = [state["exp_avg"].tolist() for state in optimizer.state_dict()["state"].values()]
    expected = [[tensor.tolist() for tensor in model.state_dict().values()], moments]
    for result in run(load_newest, 3, address):
        assert result == {"epoch": 2, "extra": {"epoch": 2}, "values": expected}
    with dx.init():
        # A run folder is searched, too, and a checkpoint is one itself.
        assert checkpoint.load(address.removesuffix("/checkpoints"), model=net()).epoch == 2
        loaded = checkpoint.load(f"{address}/epoch-000001-step-000000000", model=net())
        assert (loaded.epoch, loaded.extra) == (1, {"epoch": 1})


def test_a_folder_without_checkpoints_has_none(address: str) -> None:
    with dx.init():
        assert checkpoint.read_extra(address) is None
        with pytest.raises(CheckpointError, match="there is no complete checkpoint in"):
            checkpoint.load(address, model=net())


def die_before_state(folder: str) -> str:
    with dx.init():
        model, _ = make_run(1.0)
        writer = CheckpointWriter(folder, RunState(model=model))
        for epoch in (1, 2, 2):
            if epoch == 2:
                checkpoint.write_json = lambda *_: os._exit(0)  # type: ignore[assignment,attr-defined]
            writer.save(epoch=epoch, step=0, extra={"epoch": epoch}, wait=True)
            writer.wait()
    return "it lived"


def test_killed_save_leaves_the_previous_checkpoint(address: str, store: StandIn) -> None:
    assert run(die_before_state, 1, address) == [None]
    assert any(name.startswith("epoch-000002") for name in keys(store, address))
    with dx.init():
        assert checkpoint.load(address, model=net()).epoch == 1


def save_again_and_die(folder: str) -> str:
    with dx.init():
        model, _ = make_run(1.0)
        checkpoint.save(folder, model=model, epoch=1)
        checkpoint.write_json = lambda *_: os._exit(0)  # type: ignore[assignment,attr-defined]
        model, _ = make_run(5.0)
        checkpoint.save(folder, model=model, epoch=1)
    return "it lived"


def test_killed_save_of_the_same_name_leaves_the_old_one(address: str, store: StandIn) -> None:
    assert run(save_again_and_die, 1, address) == [None]
    expected, _ = make_run(1.0)
    with dx.init():
        model = net()
        checkpoint.load(address, model=model)
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, expected.state_dict()[name])
        # The next save deletes what was left behind.
        checkpoint.save(address, model=model, epoch=1)
    assert len(keys(store, address)) == 2


def test_keeps_the_newest_and_the_protected(address: str, store: StandIn) -> None:
    with dx.init():
        model, _ = make_run(1.0)
        writer = CheckpointWriter(address, RunState(model=model), keep=2)
        for epoch in range(1, 6):
            writer.save(epoch=epoch, step=0, extra={}, wait=True)
            writer.wait()
            if epoch == 1:
                writer.protected = Path(address) / checkpoint.folder_name(1)
        names = {name.partition("/")[0] for name in keys(store, address)}
        assert names == {checkpoint.folder_name(epoch) for epoch in (1, 4, 5)}
        checkpoint.remove_all(address)
    assert keys(store, address) == []


def test_damage_and_refusals_name_the_object(address: str, store: StandIn) -> None:
    with dx.init():
        model, _ = make_run(1.0)
        store.fail("PUT", "tensors-0", answer("403 Forbidden", "AccessDenied"))
        with pytest.raises(CheckpointError, match=rf"no permission for {address}/epoch-000001\S+tensors-0"):
            checkpoint.save(address, model=model, epoch=1)
        checkpoint.save(address, model=model, epoch=1)
        (name,) = [name for name in keys(store, address) if name.endswith(".bin")]
        bucket, _, prefix = address.removeprefix("s3://").partition("/")
        body = store.client().get_object(Bucket=bucket, Key=f"{prefix}/{name}")["Body"].read()
        store.client().put_object(Bucket=bucket, Key=f"{prefix}/{name}", Body=b"\xff" + body[1:])
        with pytest.raises(CheckpointError, match=r"tensors-0-\w+.bin is damaged"):
            checkpoint.load(address, model=net())
        store.client().delete_object(Bucket=bucket, Key=f"{prefix}/{name}")
        with pytest.raises(CheckpointError, match=r"tensors-0-\w+.bin is missing"):
            checkpoint.load(address, model=net())


def test_local_files_are_not_left_behind(address: str, cache: Path) -> None:
    with dx.init():
        checkpoint.save(address, model=net(), epoch=1)
        assert not list(checkpoint_store.find_local_folder(address).iterdir())

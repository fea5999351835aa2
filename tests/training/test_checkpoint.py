"""Checkpoints: complete or absent, of whole and of split models, loaded by other numbers of ranks."""

import json
import math
import os
import resource
import shutil
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from threading import Event
from typing import Any, TypeAlias

import dgl
import pytest
import torch
from torch import nn

from dglx_dist.comm.session import start_session
from dglx_dist.data.partition.base import PartitionPlan
from dglx_dist.data.partition.prepare import partition_to_disk
from dglx_dist.data.storage.files import lock_exclusive
from dglx_dist.errors import CheckpointError, ConfigError, StorageError
from dglx_dist.graph import optim
from dglx_dist.graph.dist_graph import DistGraph
from dglx_dist.graph.dist_tensor import view_owned_rows
from dglx_dist.graph.embedding import DistEmbedding
from dglx_dist.strategies.base import STRATEGIES, WrappedModel
from dglx_dist.training import checkpoint
from dglx_dist.training.checkpoint import CheckpointWriter, RunState
from dglx_dist.training.checkpoint_folder import folder_name
from tests.api.graphs import two_triangles
from tests.graph import small
from tests.helpers.ranks import run_ranks


class Position:
    def __init__(self, epoch: int = 0, step: int = 3, steps: int = 5) -> None:
        self._position, self._steps = {"epoch": epoch, "step": step}, steps

    def __len__(self) -> int:
        return self._steps

    def state_dict(self) -> dict[str, int]:
        return self._position

    def load_state_dict(self, state: Any) -> None:
        raise CheckpointError("of another seed")


class Unnumbered(Position):
    def state_dict(self) -> dict[str, int]:
        return {"batches": 3}


def net(width: int = 3) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(width, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2)).double()


class Stateful(nn.Linear):
    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 3}


def _fail_on_one_rank(folder: str) -> None:
    session = start_session(timeout_s=60)
    odd = session.topology.rank == 1
    Path(folder, "a file").touch()
    session.store.barrier("the file")  # type: ignore[union-attr]
    of_first, of_second = ("rank 0 on .*", "") if odd else ("", "rank 1 on .*")
    strange = Stateful(2, 2) if odd else nn.Linear(2, 2)
    for message, action in (
        ("no complete checkpoint", lambda: checkpoint.load(folder, model=net())),
        (
            f"^{of_second}extra cannot be saved",
            lambda: checkpoint.save(folder, model=net(), extra={"when": object()} if odd else None),
        ),
        (f"^{of_second}'_extra_state' of .* dict", lambda: checkpoint.save(folder, model=strange)),
        (f"^{of_first}.*a file", lambda: checkpoint.save(Path(folder, "a file"), model=net())),
    ):
        with pytest.raises(CheckpointError, match=message):
            action()
    checkpoint.save(folder, model=net(), epoch=1)
    with pytest.raises(CheckpointError, match=r"'0.weight' is \(4, 3\)"):
        checkpoint.load(folder, model=net(9 if odd else 3))


def test_what_fails_on_one_rank_fails_on_all_and_the_run_goes_on(tmp_path: Path) -> None:
    run_ranks(_fail_on_one_rank, 2, args=(str(tmp_path),))


def test_names_a_checkpoint_by_the_position_of_its_loader(tmp_path: Path) -> None:
    with start_session():
        for loader, inputs in (
            (Position(epoch=2, step=3), {}),
            (Position(epoch=2, step=4), {"epoch": 2}),
            # After the last step, in the body of the loop or behind it.
            (Position(epoch=2, step=5), {}),
            (Position(epoch=3, step=5), {"epoch": 3, "step": 5}),
            (Position(epoch=4, step=5), {"epoch": 5}),
            (Position(epoch=6, step=0), {"epoch": 6, "step": 0}),
        ):
            checkpoint.save(tmp_path, model=net(), loader=loader, **inputs)
    names = [(2, 3), (2, 4), (3, 0), (4, 0), (5, 0), (6, 0)]
    assert sorted(path.name for path in tmp_path.glob("epoch*")) == [folder_name(*name) for name in names]
    state = json.loads((tmp_path / folder_name(3) / "state.json").read_text())
    assert state["loader"] == [{"epoch": 3, "step": 0}]


def _save_elsewhere(folder: str) -> None:
    odd = start_session().topology.rank == 1
    loader = Position(epoch=2, step=3)
    for inputs, problem in (
        ({"loader": loader, "epoch": 0}, "^epoch=0 would name .* step 3 of epoch 2. Remove"),
        ({"loader": loader, "epoch": 2, "step": 1}, "^epoch=2 and step=1 would"),
        ({"loader": loader, "epoch": 2 + odd}, "epoch=3 would" if odd else "rank 1 .*epoch=3"),
        ({"epoch": 2 + odd}, "epoch and step of a checkpoint"),
        ({"epoch": -1}, "epoch=-1"),
        ({"step": 1.5}, "step=1.5"),
        ({"loader": Unnumbered()}, "position {'batches': 3} of the loader needs epoch and step from its"),
    ):
        with pytest.raises(ConfigError, match=problem):
            checkpoint.save(folder, model=net(), **inputs)
    assert not list(Path(folder).iterdir())


def test_refuses_epochs_that_are_not_those_of_the_loader(tmp_path: Path) -> None:
    run_ranks(_save_elsewhere, 2, args=(str(tmp_path),))


def test_warns_when_a_save_without_epoch_replaces_one(tmp_path: Path) -> None:
    with start_session(), warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        checkpoint.save(tmp_path, model=net())
        checkpoint.save(tmp_path, model=net(), epoch=0)
        assert not shown
        path = checkpoint.save(tmp_path, model=net())
    assert [str(warning.message).partition(";")[0] for warning in shown] == [
        f"{path} is replaced: saves without epoch= share one name. Pass epoch= to keep both."
    ]


def make_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = net()
    return model, torch.optim.Adam(model.parameters(), lr=0.05)


@pytest.fixture
def saved_folder(tmp_path: Path) -> Path:
    model, optimizer = make_model()
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(6, 3, dtype=torch.float64)).pow(2).mean().backward()
        optimizer.step()
    with start_session():
        dataset = {"nodes": 5}
        return checkpoint.save(
            tmp_path, model=model, optimizer=optimizer, dataset=dataset, loader=Position(epoch=3, step=2)
        )


def test_continues_with_the_dtypes_of_an_optimizer_that_differ_from_parameters(
    tmp_path: Path,
) -> None:
    """NAdam multiplies its momentum in float32, also for parameters of float64."""
    rows = torch.randn(6, 3, dtype=torch.float64)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(rows).pow(2).mean().backward()
        optimizer.step()

    models = [net().eval() for _ in range(2)]
    optimizers = [torch.optim.NAdam(model.parameters(), lr=0.1) for model in models]
    with start_session():
        for _ in range(2):
            step(models[0], optimizers[0])
        checkpoint.save(tmp_path, model=models[0], optimizer=optimizers[0], epoch=1)
        checkpoint.load(tmp_path, model=models[1], optimizer=optimizers[1])
        for model, optimizer in zip(models, optimizers, strict=True):
            step(model, optimizer)
    for left, right in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(left, right)


def test_mismatches_name_the_first_difference(saved_folder: Path, tmp_path: Path) -> None:
    model = net()
    with start_session():
        bare = checkpoint.save(tmp_path / "bare", model=model)
        cases: list[tuple[Path, dict[str, Any], str]] = [
            (saved_folder, {"model": net(9)}, r"'0\.weight' is \(4, 3\).*but \(4, 9\)"),
            (
                saved_folder,
                {"model": net().float()},
                r"'0\.weight' is .*float64 .* torch\.float32 in this model",
            ),
            (saved_folder, {"model": nn.Sequential(net()[0])}, r"has '1\.weight', but this model does not"),
            (saved_folder, {"model": nn.Sequential(*net(), nn.Linear(2, 2))}, r"this model has '4\.weight'"),
            (saved_folder, {"dataset": {"nodes": 6}}, "nodes=5, but this one has 6"),
            (saved_folder, {"optimizer": torch.optim.SGD(model.parameters(), lr=1.0)}, "is Adam, not SGD"),
            (saved_folder, {"optimizer": torch.optim.Adam(model[0].parameters())}, "parameter group 0"),
            (bare, {"optimizer": torch.optim.Adam(model.parameters())}, "has no optimizer"),
            (bare, {"loader": Position()}, "no loader position"),
        ]
        for path, case, message in cases:
            with pytest.raises(CheckpointError, match=message):
                checkpoint.load(path, **{"model": model, **case})
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer.param_groups[0]["schedule"] = lambda step: step
        with pytest.raises(CheckpointError, match="'schedule' of type function"):
            checkpoint.save(tmp_path, model=model, optimizer=optimizer)


State: TypeAlias = dict[str, Any]


def check_refusal(saved_folder: Path, said: str) -> None:
    model, optimizer = make_model()
    before = str(model.state_dict())
    with start_session(), pytest.raises(CheckpointError, match=said):
        checkpoint.load(saved_folder, model=model, optimizer=optimizer, loader=Position())
    assert str(model.state_dict()) == before
    assert not optimizer.state


@pytest.mark.parametrize("length", [None, -1])
def test_damage_is_found_and_changes_nothing(saved_folder: Path, length: int | None) -> None:
    file = saved_folder / "tensors-0.bin"
    raw = bytearray(file.read_bytes())
    raw[8] ^= 1
    file.write_bytes(raw[:length])
    check_refusal(saved_folder, r"tensors-0\.bin is damaged")


def entry(**change: Any) -> Callable[[State], State]:
    name = "random/0/cpu"
    return lambda state: state | {"tensors": state["tensors"] | {name: state["tensors"][name] | change}}


def without(absent: str) -> Callable[[State], State]:
    return lambda state: {name: value for name, value in state.items() if name != absent}


def with_lr(value: object) -> Callable[[State], State]:
    def change_state(state: State) -> State:
        state["optimizer"]["groups"][0]["lr"] = value
        return state

    return change_state


def with_setting(name: str, value: object) -> Callable[[State], State]:
    def change_state(state: State) -> State:
        state["optimizer"]["groups"][0] |= {name: value}
        if value is None:
            del state["optimizer"]["groups"][0][name]
        return state

    return change_state


def with_tensor(name: str, other: str) -> Callable[[State], State]:
    return lambda state: state | {"tensors": state["tensors"] | {name: state["tensors"][other]}}


def without_tensor(absent: str) -> Callable[[State], State]:
    return lambda state: state | {"tensors": without(absent)(state["tensors"])}


def with_scalars(scalars: object) -> Callable[[State], State]:
    return lambda state: state | {"optimizer": state["optimizer"] | {"scalars": scalars}}


@pytest.mark.parametrize(
    ("said", "change"),
    [
        ("outside of it", entry(file="../other.bin")),
        ("outside of it", entry(file="/dev/zero")),
        ("is missing", entry(file="other.bin")),
        ("shorter than", entry(num_bytes=1 << 60)),
        ("has the shape .* and .* bytes", entry(shape=[1 << 60])),
        ("no whole number", entry(shape=[-1])),
        ("torch does not have", entry(dtype=5)),
        ("torch does not have", entry(dtype="save")),
        ("torch does not have", with_lr({"tensor": 0.1, "dtype": "load"})),
        ("damaged", with_lr({"tensor": 1 << 70, "dtype": "int8"})),
        ("'lr' of the optimizer is 'much'", with_lr("much")),
        *(("'lr' of the optimizer is", with_lr(lr)) for lr in (-1.0, 1e308, math.nan)),
        (
            "'capturable' of the optimizer is tensor",
            with_setting("capturable", {"tensor": 1, "dtype": "int8"}),
        ),
        ("does not take the saved settings: Invalid beta", with_setting("betas", {"tuple": [2.0, 0.9]})),
        ("does not take the saved settings", with_setting("betas", [0.9])),
        ("damaged.*KeyError: 'lr'", with_setting("lr", None)),
        *(
            (f"KeyError: '{name}'", without_tensor(f"optimizer/0.bias/{name}"))
            for name in ("step", "exp_avg")
        ),
        ("'exp_avg' of .* shape", with_tensor("optimizer/0.bias/exp_avg", "optimizer/0.weight/exp_avg")),
        ("it belongs to step 2 of epoch 4", lambda state: state | {"epoch": 4}),
        ("damaged", with_scalars({"0.bias": 5})),
        ("damaged", with_scalars({})),
        ("of another seed", lambda state: state),
        ("random state", entry(dtype="int8")),
        (
            "version 1, but this package reads 3. Load it with the package",
            lambda state: state | {"version": 1},
        ),
        *((rf"state\.json is damaged.*'{name}'", without(name)) for name in ("tensors", "extra", "loader")),
        (r"state\.json is damaged.*'world_size'", without("world_size")),
    ],
)
def test_entries_of_a_stranger_are_refused_before_anything_is_made_of_them(
    saved_folder: Path, said: str, change: Callable[[State], State]
) -> None:
    file = saved_folder / "state.json"
    checkpoint.write_json(file, change(json.loads(file.read_text())))
    check_refusal(saved_folder, said)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        # A digit or a name that has changed is valid JSON, too; without the sum, any could have.
        *(
            (old, new, r"state\.json is damaged.*have changed")
            for old, new in {
                '"lr": 0.05': '"lr": 0.45',
                '"epoch": 3': '"epoch": 1',
                '"step": 2': '"step": 6',
                '"optimizer/0.bias/step": {': '"optimizer/0.bias/stap": {',
            }.items()
        ),
        ('"crc32"', '"crc31"', r"state\.json is damaged.*'crc32'"),
        *((None, text, r"state\.json") for text in ("null", "[1]", "[" * 100_000, '{"version": 3}')),
        (None, '{"version": 3, "world_size": "a"}', r"state\.json"),
    ],
    ids=lambda text: str(text)[:20],
)
def test_text_that_has_changed_is_refused(saved_folder: Path, old: str | None, new: str, said: str) -> None:
    file = saved_folder / "state.json"
    text = file.read_text()
    assert old is None or old in text
    file.write_text(new if old is None else text.replace(old, new))
    check_refusal(saved_folder, said)


def test_a_huge_state_is_not_read(saved_folder: Path) -> None:
    os.truncate(saved_folder / "state.json", 1 << 29)
    check_refusal(saved_folder, "it has more than 268 MB")


def test_no_file_of_a_checkpoint_is_a_pickle(saved_folder: Path) -> None:
    assert sorted(path.name for path in saved_folder.iterdir()) == ["state.json", "tensors-0.bin"]
    json.loads((saved_folder / "state.json").read_text())
    # A tensor's own bytes.
    assert torch.get_rng_state().numpy().tobytes() in (saved_folder / "tensors-0.bin").read_bytes()


def _die_while_saving(folder: str) -> str:
    start_session()
    writer = CheckpointWriter(folder, RunState(model=net()))
    writer.save(epoch=1, step=0, extra={})
    writer.wait()
    checkpoint.write_json = lambda *_: os._exit(0)  # type: ignore[assignment,attr-defined]
    writer.save(epoch=2, step=0, extra={})
    writer.wait()
    return "it lived"


def test_a_killed_save_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    assert run_ranks(_die_while_saving, 1, args=(str(tmp_path),)) == [None]
    complete, left = sorted(path.name for path in tmp_path.iterdir())
    assert complete == "epoch-000001-step-000000000"
    assert left.startswith("epoch-000002-step-000000000.")
    assert left.endswith(".partial")
    with start_session():
        assert checkpoint.load(tmp_path, model=net()).epoch == 1
        # The next save, of any epoch, removes what was left behind.
        checkpoint.save(tmp_path, model=net(), epoch=3)
        assert checkpoint.find_latest(tmp_path).name == "epoch-000003-step-000000000"
        assert len(list(tmp_path.iterdir())) == 2


def _write_while_training_goes_on(data: str, folder: str) -> None:
    session = start_session(timeout_s=60)
    g = DistGraph(data)
    model, rows = net(), DistEmbedding(small.NUM_NODES, 2, "rows", graph=g)
    sparse = optim.SparseAdam([rows], lr=0.1)
    writer = CheckpointWriter(folder, RunState(model=model, sparse=sparse), keep=2)
    may_write, write = Event(), checkpoint.write_tensors
    checkpoint.write_tensors = lambda *of: write(*of) if may_write.wait(60) else {}  # type: ignore[attr-defined]

    def values() -> str:
        g.barrier()
        return str([model.state_dict(), rows.weight.to_local()])

    before, same_rows = values(), view_owned_rows(rows.weight)
    for epoch in (1, 2, 3):
        may_write.clear()
        writer.save(epoch=epoch, step=0, extra={})
        assert not (Path(folder) / f"epoch-{epoch:06d}-step-000000000").exists()
        with torch.no_grad():
            for tensor in (*model.parameters(), same_rows):
                tensor.add_(1)
        may_write.set()
        writer.wait()
        assert values() != before
        checkpoint.load(folder, model=model, sparse=sparse)
        assert values() == before
    left = sorted(path.name for path in Path(folder).iterdir())
    assert [name[:12] for name in left] == ["epoch-000002", "epoch-000003"]
    # A full disk on one rank: the run hears of it at the next checkpoint, which is not begun.
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if session.topology.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    writer.save(epoch=4, step=0, extra={})
    with pytest.raises(
        CheckpointError, match=r"^rank 1 on .*epoch-000004.*cannot be written.*File too large"
    ):
        writer.save(epoch=5, step=0, extra={})
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sorted(path.name for path in Path(folder).iterdir()) == left
    assert writer.save(epoch=6, step=0, extra={}, wait=True).is_dir()
    assert len(list(Path(folder).iterdir())) == 2


def test_a_checkpoint_is_written_from_a_copy_while_training_goes_on(tmp_path: Path) -> None:
    small.write(small.build(), tmp_path / "graph")
    run_ranks(_write_while_training_goes_on, 2, args=(str(tmp_path / "graph"), str(tmp_path / "saved")))


def test_saving_again_replaces_and_the_newest_wins(tmp_path: Path) -> None:
    with start_session():
        assert checkpoint.read_extra(tmp_path) is None
        with pytest.raises(CheckpointError, match="no complete checkpoint"):
            checkpoint.find_latest(tmp_path / "nowhere")
        for epoch, note in ((2, "first"), (10, "a"), (10, "b")):
            checkpoint.save(tmp_path, model=net(), epoch=epoch, extra={"note": note})
        result = checkpoint.load(tmp_path, model=net())
        assert (result.epoch, result.extra) == (10, {"note": "b"})
        assert sorted(path.name for path in tmp_path.iterdir()) == [
            "epoch-000002-step-000000000",
            "epoch-000010-step-000000000",
        ]
        # Killed between the two renames of a replacement: the old one still counts.
        newest = tmp_path / "epoch-000010-step-000000000"
        for suffix in (".old", ".old-0123abcd.partial"):
            newest = newest.rename(tmp_path / f"epoch-000010-step-000000000{suffix}")
            assert checkpoint.load(tmp_path, model=net()).epoch == 10


def test_a_full_disk_is_one_message_without_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dglx_dist.training.checkpoint.os.fsync", full)
    with start_session(), pytest.raises(CheckpointError, match=r"cannot be written.*No space left") as caught:
        checkpoint.save(tmp_path, model=torch.nn.Linear(2, 2))
    assert "Traceback" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_one_job_at_a_time_saves_to_a_folder(tmp_path: Path) -> None:
    lock = lock_exclusive(tmp_path / ".run.lock", 0.0)
    with start_session(timeout_s=1.0):
        with pytest.raises(StorageError, match=r"another job uses .*\.run\.lock"):
            checkpoint.lock_folder(tmp_path / "run")
        os.close(lock)
        for _ in range(2):
            checkpoint.lock_folder(tmp_path / "run")
        with pytest.raises(StorageError, match="another job"):
            lock_exclusive(tmp_path / ".run.lock", 0.0)
    os.close(lock_exclusive(tmp_path / ".run.lock", 0.0))


def test_several_optimisers_are_saved_in_their_order(tmp_path: Path) -> None:
    small.write(small.build(), tmp_path / "graph")
    model = nn.Linear(1, 1)
    with start_session(seed=1):
        g = DistGraph(tmp_path / "graph")
        rows = [DistEmbedding(small.NUM_NODES, width, f"rows-{width}", graph=g) for width in (1, 2)]
        both = [optim.SparseAdam(rows[:1], lr=0.1), optim.SparseSGD(rows[1:], lr=0.2, mode="async")]
        (rows[0]([3]).sum() + rows[1]([4]).sum()).backward()
        for optimizer in both:
            optimizer.step()
        saved_rows = [embedding.weight.to_local() for embedding in rows]
        path = checkpoint.save(tmp_path / "saved", model=model, sparse=both)
        for embedding, optimizer in zip(rows, both, strict=True):
            embedding.weight[[3, 4]] = torch.zeros(2, embedding.embedding_dim)
            optimizer.lr = 9.0
        for wrong, message in (
            (both[:1], "has 2 optimizers of embeddings, but sparse= has 1"),
            (both[::-1], "'SparseAdam', this run has 'SparseSGD'"),
            ([], "sparse= has 0"),
        ):
            with pytest.raises(CheckpointError, match=message):
                checkpoint.load(path, model=model, sparse=wrong)
        second = checkpoint.save(tmp_path / "saved", model=model, sparse=both, epoch=1)
        (second / "sparse" / "1").rename(tmp_path / "rows")
        shutil.copytree(path / "sparse" / "1", second / "sparse" / "1")
        with pytest.raises(CheckpointError, match=r"sparse/1 is damaged or belongs to another checkpoint"):
            checkpoint.load(second, model=model, sparse=both)
        os.truncate(second / "sparse" / "0" / "index.json", 1 << 29)
        with pytest.raises(CheckpointError, match="it has more than 268 MB"):
            checkpoint.load(second, model=model, sparse=both)
        checkpoint.load(path, model=model, sparse=both)
        assert [optimizer.lr for optimizer in both] == [0.1, 0.2]
        assert all(torch.equal(e.weight.to_local(), then) for e, then in zip(rows, saved_rows, strict=True))


STEPS, SAVE_AT = 5, 3


class Counting(torch.optim.SGD):
    """With a tuple for each parameter."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["seen"] = self.state[parameter].get("seen", ()) + (1,)  # noqa: RUF005
        return super().step(closure)


OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.01, amsgrad=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.5),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "tuples": lambda p: Counting(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, centered=True),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "tensor lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1), betas=(0.8, 0.99)),
}


def convolution() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(dgl.nn.SAGEConv(2, 4, "mean")).double()


def step_alike(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Gradients that depend on the step only; a piece of no columns gets none."""
    module = model.module if isinstance(model, WrappedModel) else model
    for step in steps:
        random = torch.Generator().manual_seed(step)
        for name, parameter in convolution().named_parameters():
            gradient = torch.randn(parameter.shape, generator=random, dtype=torch.float64)
            own = model.cut_state(name, gradient) if isinstance(model, WrappedModel) else gradient
            module.get_parameter(name).grad = own if own.numel() else None
        optimizer.step()


def on_rank(data: str, folder: str, size: int, resume: bool) -> dict[str, Any]:
    """Train, save on the way or go on from there, on another number of ranks; the final state by optimizer.

    ``size`` 0: a plain module, uncut.
    """
    results = {}
    with start_session(timeout_s=30) as session:
        g = DistGraph(data)
        for name, make in OPTIMIZERS.items():
            model = convolution()
            if size:
                model = STRATEGIES.get("push_pull")(session, {"group_size": size}).open(g).wrap(model)
            optimizer = make(model.parameters())
            place = f"{folder}/{name}"
            if resume:
                with pytest.raises(CheckpointError, match=r"inside epoch 0 of a run on \d ranks"):
                    checkpoint.load(place, model=model, optimizer=optimizer, loader=Position())
                checkpoint.load(place, model=model, optimizer=optimizer)
            else:
                step_alike(model, optimizer, range(SAVE_AT))
                loader = Position(step=SAVE_AT, steps=STEPS)
                checkpoint.save(place, model=model, optimizer=optimizer, loader=loader)
            step_alike(model, optimizer, range(SAVE_AT, STEPS))
            results[name] = {key: value.tolist() for key, value in model.state_dict().items()}
    return results


def on_four(data: str, by_parts: str, uncut: str) -> list[dict[str, Any]]:
    """Save by four parts; load by two parts, each of which has two replicas."""
    return [on_rank(data, by_parts, 4, False), on_rank(data, uncut, 2, True)]


def test_what_is_saved_by_parts_or_uncut_is_loaded_uncut_or_by_parts(tmp_path: Path) -> None:
    partition_to_disk(two_triangles(), tmp_path / "data", PartitionPlan(num_parts=1, method="hash"))
    data, by_parts, uncut = (str(tmp_path / name) for name in ("data", "parts", "uncut"))
    plain = {}
    for name, make in OPTIMIZERS.items():
        model = convolution()
        step_alike(model, make(model.parameters()), range(STEPS))
        plain[name] = {key: value.tolist() for key, value in model.state_dict().items()}
    assert on_rank(data, uncut, 0, False) == plain
    # Two of four parts have no columns, hence no gradient and no optimizer state of their own.
    assert run_ranks(on_four, 4, args=(data, by_parts, uncut)) == [[plain] * 2] * 4
    assert on_rank(data, by_parts, 0, True) == plain
    assert run_ranks(on_rank, 2, args=(data, by_parts, 2, True)) == [plain] * 2

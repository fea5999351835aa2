"""``dglx train --model-file``: a model of the user's own, from a file that every rank runs."""

import hashlib
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.dataset
import pytest

from dglx_dist.cli.train_job import train_dataset
from dglx_dist.errors import ConfigError
from tests.api.graphs import plan_of, read_tables
from tests.helpers.ranks import run_ranks

SAGE = """
import dgl, torch
class Model(torch.nn.Module):
    def __init__(self, in_dim, hidden, *, classes, layers=2):
        super().__init__()
        self.one, self.two = (dgl.nn.SAGEConv(a, b, "mean") for a, b in [(in_dim, hidden), (hidden, classes)])
    def forward(self, blocks, h):
        return self.two(blocks[1], torch.relu(self.one(blocks[0], h)))
"""
LAYERS = """
    def inference_layers(self):
        return [lambda block, h: torch.relu(self.one(block, h)), self.two]
def plain(in_dim, hidden, classes, layers, dropout, **more):
    assert sorted(more) == ["graph", "heads"]
    return Model(in_dim, hidden, classes=classes)
"""
FAULTS = {
    "def Model(:\n": "SyntaxError",
    "import nothing_here": "ModuleNotFoundError: No module named 'nothing_here'",
    "raise SystemExit(3)": "SystemExit: 3",
    "Other = 1": "there is no 'Model' in it",
    "import dataclasses as d\n@d.dataclass\nclass Model:\n    in_dim: int": "returns Model, not an nn.Module",
    "Model = 1": "TypeError: 1 is not a callable object",
    "def Model(in_dim): return in_dim": "Model returns int, not an nn.Module",
    "def Model(width): pass": "required positional argument: 'width'. It is called with those of in_dim",
    SAGE.replace("blocks[0]", "blocks[5]"): "line 8: IndexError: list index out of range",
    SAGE.replace("(hidden, classes)", "(hidden, 3)"): "for 2 targets of 4 classes it returns \\(2, 3\\)",
    SAGE.replace("return self.two", "return self.one(blocks[0], h) #"): "it returns \\(4, 8\\)",
}


def own(dataset: str, out: Path, text: str, name: str = "Model", **changes: Any) -> Any:
    file = out.parent / "my_model.py"
    # Every rank writes it, and none may read what another has begun to write.
    begun = file.with_suffix(f".{os.getpid()}")
    begun.write_text(text)
    begun.replace(file)
    return plan_of(dataset, out, model_file=f"{file}:{name}", fanouts=(-1, -1), epochs=2, **changes)


def rows_of(out: Path) -> Any:
    table = pyarrow.dataset.dataset(out / "rows").to_table().sort_by("id")
    return np.array(table["embedding"].to_pylist())


WITHOUT: dict[str, Any] = {"predictions": None, "save_embeddings": None}


def train_both(dataset: str, folder: str) -> list[Any]:
    """The file with and without layers, and the same as a ready-made model."""
    out = Path(folder)
    losses = [
        [epoch.loss for epoch in train_dataset(plan).epochs]
        for plan in (
            plan_of(dataset, out / "sage", model="sage", fanouts=(-1, -1), epochs=2),
            own(dataset, out / "own", SAGE + LAYERS, "plain"),
            own(dataset, out / "full", SAGE + LAYERS, strategy="full_graph", **{"predictions": None}),
        )
    ]
    losses.append([epoch.loss for epoch in train_dataset(own(dataset, out / "bare", SAGE, **WITHOUT)).epochs])
    return losses


def test_a_file_trains_as_the_ready_made_model(dataset: str, tmp_path: Path) -> None:
    """Also evaluated: by its layers, or without them by whole neighbourhoods."""
    for result in run_ranks(train_both, 2, args=(dataset, str(tmp_path))):
        sage, local, full, bare = result
        np.testing.assert_allclose([local, bare], [sage, sage], rtol=1e-6)
        np.testing.assert_allclose(full, sage, rtol=1e-5)
    for left, right in zip(read_tables(tmp_path / "own"), read_tables(tmp_path / "sage"), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-6)
    of_full, of_own = (rows_of(tmp_path / name) for name in ("full", "own"))
    np.testing.assert_allclose(of_full, of_own, rtol=1e-4, atol=1e-5)
    accuracies = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("sage", "bare")]
    assert accuracies[0]["test_accuracy"] == accuracies[1]["test_accuracy"]
    config = json.loads((tmp_path / "bare" / "config.json").read_text())
    assert config["model"] == "my_model.py:Model"
    assert config["model_sha256"] == hashlib.sha256(SAGE.encode()).hexdigest()


def test_the_model_of_the_docs(dataset: str, tmp_path: Path) -> None:
    """Its layers give the predictions."""
    page = (Path(__file__).parents[2] / "docs" / "guides" / "own_model.md").read_text()
    (text,) = (item for item in re.findall(r"```python\n(.*?)```", page, re.S) if "class Model" in item)
    trained = train_dataset(own(dataset, tmp_path / "run", text))
    assert trained.epochs[1].loss < trained.epochs[0].loss
    classes, rows = read_tables(tmp_path / "run")
    assert (len(classes), rows.shape[1]) == (500, 8)


def test_a_resumed_run_is_given_the_same_file(dataset: str, tmp_path: Path) -> None:
    plan = own(dataset, tmp_path / "run", SAGE, checkpoint_every=1, **WITHOUT)
    train_dataset(plan)
    assert len(train_dataset(replace(plan, epochs=3, model_sha256="")).epochs) == 3
    for changed in (
        plan_of(dataset, tmp_path / "run", fanouts=(-1, -1), checkpoint_every=1, **WITHOUT),
        own(dataset, tmp_path / "run", SAGE + "# another", checkpoint_every=1, **WITHOUT),
    ):
        with pytest.raises(ConfigError, match=r"checkpoints of another configuration .*model_sha256"):
            train_dataset(replace(changed, epochs=4))
    with pytest.raises(ConfigError, match="differs from the file at the start of the run"):
        train_dataset(plan)


def faults_of(dataset: str, folder: str) -> list[str]:
    """Return the message of each rank about a file that is wrong on rank 1."""
    from dglx_dist.comm.topology import read_topology

    rank, message = read_topology().rank, []
    for number, text in enumerate(FAULTS):
        out = Path(folder) / f"{rank}-{number}" / "run"
        out.parent.mkdir(exist_ok=True)
        with pytest.raises(ConfigError) as error:
            train_dataset(own(dataset, out, text if rank == 1 else SAGE, **WITHOUT))
        message.append(str(error.value))
    return message


def differ(dataset: str, folder: str) -> str:
    from dglx_dist.comm.topology import read_topology

    out = Path(folder) / str(read_topology().rank) / "run"
    out.parent.mkdir()
    with pytest.raises(ConfigError) as error:
        train_dataset(own(dataset, out, SAGE + "#" * read_topology().rank, **WITHOUT))
    return str(error.value)


def test_files_that_differ_between_ranks_are_refused(dataset: str, tmp_path: Path) -> None:
    for result in run_ranks(differ, 2, args=(dataset, str(tmp_path))):
        assert result.startswith("ranks disagree on the content of --model-file")


def test_a_wrong_file_ends_all_ranks_with_the_reason(dataset: str, tmp_path: Path) -> None:
    for result in run_ranks(faults_of, 2, args=(dataset, str(tmp_path))):
        for text, expected in zip(result, FAULTS.values(), strict=True):
            assert re.search(expected, text)
    assert result[0].startswith("--model-file /")


def test_what_is_refused_before_a_start(dataset: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"must be FILE\.py:NAME"):
        plan_of(dataset, tmp_path, model_file="my_model.py")
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        plan_of(dataset, tmp_path, model_file=f"{tmp_path}/none.py:Model")
    with pytest.raises(ConfigError, match=r"replaces --model gat\. Use one of the two"):
        own(dataset, tmp_path / "run", SAGE, model="gat")
    with pytest.raises(ConfigError, match=r"--model my_model\.py:Model has no --norm"):
        own(dataset, tmp_path / "run", SAGE, norm="layer")
    with pytest.raises(ConfigError, match=r"has no inference_layers\(\).*leave these options out"):
        train_dataset(own(dataset, tmp_path / "run", SAGE))

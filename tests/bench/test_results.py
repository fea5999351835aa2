import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from dglx_dist.errors import StorageError
from scripts.bench import results
from scripts.bench.records import Outcome
from scripts.out_files import write_text
from tests.bench.helpers import outcome, with_curves

PLAYED = replace(with_curves(outcome(simulated="compute")), status="failed", reason="stopped", label="quick")
MEASURED = Path(__file__).parents[2] / "docs" / "results" / "raw"


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    plain = Outcome(experiment="", status="measured")
    assert not [
        field for field in fields(Outcome) if getattr(PLAYED, field.name) == getattr(plain, field.name)
    ]
    # Of real ones: a curve and fixed rates, a share of the cores, turns of a job.
    result = {name: results.read_one(MEASURED / f"{name}.json.gz") for name in ("D1", "D3", "Y1")}
    for item in (PLAYED, *filter(None, result.values())):
        path = results.write(tmp_path / "new", item)
        assert path == tmp_path / "new" / f"{item.experiment}.json"
        assert results.read_one(path) == item
    assert results.read(tmp_path / "new") == tuple(result.values())
    assert len(list((tmp_path / "new").iterdir())) == 3


def test_other_files_are_left_alone_and_results_come_by_id(tmp_path: Path) -> None:
    for name in ("Y1", "D1"):
        results.write(tmp_path, replace(PLAYED, experiment=name))
    (tmp_path / "other.json").write_text('{"format": "something else"}')
    (tmp_path / "list.json").write_text("[]")
    assert [item.experiment for item in results.read(tmp_path)] == ["D1", "Y1"]


def _lacking_a_field(value: Any) -> str:
    del value["measurements"][0]["epochs"][0]["seconds"]
    return json.dumps(value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda value: json.dumps(value)[:10], ""),
        (lambda value: json.dumps(value)[:-200], ""),
        (lambda value: json.dumps({**value, "machine": 7}), ".*machine is a int, not"),
        (lambda value: "[" * 100_000, ""),
        (_lacking_a_field, ".*seconds"),
        (lambda value: json.dumps({**value, "version": 99}), "version 99, this release reads 1"),
    ],
    ids=["short", "cut", "type", "deep", "field", "version"],
)
def test_a_damaged_result_is_named(tmp_path: Path, change: Callable[[Any], str], said: str) -> None:
    path = results.write(tmp_path, PLAYED)
    path.write_text(change(json.loads(path.read_text())))
    with pytest.raises(StorageError, match=rf"D1\.json (is damaged|has ){said}"):
        results.read(tmp_path)


def test_a_text_takes_the_place_of_the_one_before_or_leaves_it(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    for text in ("first\n", "second ü\n"):
        assert write_text(page, text) == page
    with pytest.raises(UnicodeEncodeError):
        write_text(page, "third \udc00")
    assert page.read_text(encoding="utf-8") == "second ü\n"
    assert list(tmp_path.iterdir()) == [page]
    with pytest.raises(StorageError, match=r"no-folder/page\.md"):
        write_text(tmp_path / "no-folder" / "page.md", "text")


def test_no_folder_and_one_that_cannot_be_made_are_told(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="there is no folder"):
        results.read(tmp_path / "none")
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="choose another folder with --out"):
        results.write(tmp_path / "file", PLAYED)

from pathlib import Path

import pytest

from dglx_dist.bench.pages import write_page
from dglx_dist.errors import StorageError


def test_a_page_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    for text in ("first\n", "second ü\n"):
        assert write_page(tmp_path / "page.md", text) == tmp_path / "page.md"
    assert (tmp_path / "page.md").read_text(encoding="utf-8") == "second ü\n"
    assert [path.name for path in tmp_path.iterdir()] == ["page.md"]


def test_a_place_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"no-folder/page\.md"):
        write_page(tmp_path / "no-folder" / "page.md", "text")

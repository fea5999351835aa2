"""A small graph on disk, partitioned unevenly, that every test of this room can draw."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.graph.small import build, write


@pytest.fixture(scope="session")
def small_dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the small graph in 3 parts, of which the middle one is empty."""
    folder = tmp_path_factory.mktemp("small") / "dataset"
    write(build(), folder)
    return folder

import resource
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dglx_dist.errors import StorageError
from dglx_dist.strategies.full_graph.expansion import HeldNeighborhood, read_held, remove_held, write_held
from tests.strategies.full_graph.test_split import random_closure


def test_what_is_mapped_is_what_was_written_even_after_its_files_are_gone(tmp_path: Path) -> None:
    for closure in (random_closure(), random_closure(0, (0, 0))):
        held = HeldNeighborhood(closure=closure, holders=np.arange(len(closure.nodes), dtype=np.int32))
        write_held(tmp_path / "held", held)
        again = read_held(tmp_path / "held")
        remove_held(tmp_path / "held")
        assert not (tmp_path / "held").exists()
        for name in ("nodes", "counts", "indptr", "sources", "edge_ids"):
            assert np.array_equal(getattr(again.closure, name), getattr(closure, name))
        assert again.holders.tolist() == held.holders.tolist()


def test_shared_memory_without_room_is_told_and_left_clean(tmp_path: Path) -> None:
    closure = replace(random_closure(), sources=np.arange(1 << 17))
    held = HeldNeighborhood(closure=closure, holders=np.zeros(len(closure.nodes), np.int32))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, before[1]))
    try:
        with pytest.raises(StorageError, match=r"which take 1\.. MB; free space in .*--shm-size.*one rank"):
            write_held(tmp_path / "held", held)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not (tmp_path / "held").exists()

"""Fixtures of the tests of the bench."""

import pytest

from scripts.bench.records import BenchPlan
from tests.netlab.conftest import needs_lab as needs_lab


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> BenchPlan:
    folder = tmp_path_factory.mktemp("bench")
    return BenchPlan(suite="papers", out=folder / "out", work=folder / "work")

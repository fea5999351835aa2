"""Settings of all tests: one compute thread, because the machines that run them are small."""

import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from numba.core.dispatcher import Dispatcher

torch.set_num_threads(1)

_STARTERS = {"run_ranks", "start_ranks", "run_script", "subprocess"}
"""Names that a test file which starts processes imports."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the tests marked wide, too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    named = any("::" in argument for argument in config.args) or config.getoption("-m")
    if not config.getoption("--all") and not named:
        wide = {item for item in items if {mark.name for mark in item.iter_markers()} & {"wide", "real_data"}}
        config.hook.pytest_deselected(items=list(wide))
        items[:] = [item for item in items if item not in wide]
    items.sort(key=lambda item: _place(vars(item.getparent(pytest.Module).obj)))


def _place(names: dict[str, Any]) -> int:
    """Return 0 for files that compile kernels of many processes, 1 for those that start processes."""
    if names["__name__"].startswith(("tests.dataloading", "tests.graph")):
        return 0
    if not _STARTERS.isdisjoint(names):
        return 1
    return 0 if any(isinstance(name, Dispatcher) for name in names.values()) else 2


@pytest.fixture(autouse=True)
def handlers_of_signals() -> Iterator[None]:
    """A command that starts ranks installs its own, and usually ends with its process."""
    numbers = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    if threading.current_thread() is threading.main_thread():
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.fixture(scope="session")
def worker_package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The build context of a worker's image."""
    from dglx_dist.strategies.serverless.aws.deploy import write_context

    target = tmp_path_factory.mktemp("package") / "worker"
    write_context(target)
    return target


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The graph of tests/strategies/equality.py in parts; each file has its own, as caches lie beside it."""
    from tests.strategies import equality

    return equality.write_parts(tmp_path_factory.mktemp("equality"))


@pytest.fixture(scope="module")
def dataset(folder: Path) -> str:
    return str(folder)

"""Lets DGL's own tests/distributed run against this package: its servers are nothing, its clients are ranks.

A pytest plugin; ``test_dgls_tests.py`` runs it. DGL's tests start servers and clients as processes of
``multiprocessing``'s spawn context. Here a server only says which partition it serves, and the clients that
were started before the first is joined become the ranks of one job.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
from collections.abc import Callable
from typing import Any, ClassVar

import dglx_dist.compat  # before dgl, which it lets import  # isort: skip
import dgl
import dgl.data
import pytest
import torch

from dglx_dist.comm import session
from tests.helpers.ranks import _environment

_SPAWN, _GET_CONTEXT = multiprocessing.get_context("spawn"), multiprocessing.get_context
TIMEOUT_S = 120.0


class Server:
    """In the place of DGL's ``DistGraphServer``."""

    def __init__(
        self, server_id: int, ip_config: str, servers: int, clients: int, part_config: Any, **_: Any
    ) -> None:
        os.environ["DGL_CONF_PATH"] = str(part_config)
        self.client_g = dgl.graph([])

    def start(self) -> None: ...


class Process:
    """In the place of ``multiprocessing``'s: a rank, or a server, which is run here and now."""

    waiting: ClassVar[list[Process]] = []

    def __init__(self, target: Callable[..., Any], args: tuple[Any, ...] = ()) -> None:
        self._target, self._args, self.exitcode = target, args, None
        self._real: Any = None

    def start(self) -> None:
        if "server" not in self._target.__name__:
            self.waiting.append(self)
            return
        self.exitcode = 1
        self._target(*self._args)
        self.exitcode = 0

    def join(self) -> None:
        if self in self.waiting:
            self._launch_all()
        if self._real is not None:
            self._real.join(TIMEOUT_S)
            if self._real.is_alive():
                self._real.kill()
                self._real.join()
            self.exitcode = self._real.exitcode

    def is_alive(self) -> bool:
        return self._real is None or self._real.is_alive()

    @classmethod
    def _launch_all(cls) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        for rank, item in enumerate(cls.waiting):
            variables = _environment(rank, len(cls.waiting), port, None)
            # Rank 0 hosts the store, as where scripts create the process group themselves.
            variables = {key: value for key, value in variables.items() if "ELASTIC" not in key}
            item._real = _SPAWN.Process(
                target=_rank, args=(variables, pickle.dumps((item._target, item._args)))
            )
            item._real.start()
        cls.waiting.clear()


def _rank(variables: dict[str, str], pickled: bytes) -> None:
    os.environ.update(variables)
    # After this module has put the package in the place of dgl.distributed.
    target, args = pickle.loads(pickled)
    try:
        target(*args)
        dgl.distributed.exit_client()
    except BaseException as error:
        if session.get_open_session() is not None:
            session.current_session().fail(error)
            session.current_session().close(failed=True)
        raise


class _Context:
    Process = Process

    def __getattr__(self, name: str) -> Any:
        return getattr(_SPAWN, name)


def _get_context(method: str | None = None) -> Any:
    return _Context() if method == "spawn" else _GET_CONTEXT(method)


def _citations(name: str, *_: Any, **__: Any) -> list[dgl.DGLGraph]:
    """A random graph of the size of Cora, which cannot be downloaded everywhere."""
    draw = torch.Generator().manual_seed(len(name))
    nodes = 2708
    pairs = torch.randperm(nodes * nodes, generator=draw)[:10556]
    graph = dgl.graph((pairs // nodes, pairs % nodes), num_nodes=nodes)
    graph.ndata["feat"] = torch.rand(nodes, 16, generator=draw)
    graph.ndata["label"] = torch.arange(nodes) % 7
    return [graph]


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: Any) -> None:
    """Read ``parametrize("name,", values)`` as the pytest of DGL's tests did."""
    marks = metafunc.definition.own_markers
    for at, mark in enumerate(marks):
        if mark.name == "parametrize" and str(mark.args[0]).endswith(","):
            names, *remaining = mark.args
            marks[at] = pytest.mark.parametrize(names.rstrip(","), *remaining, **mark.kwargs).mark


if "graphbolt" in vars(dgl) and not hasattr(dgl.graphbolt, "FusedCSCSamplingGraph"):
    # The newest tests ask of which of the two kinds a part is.
    dgl.graphbolt.FusedCSCSamplingGraph = type("FusedCSCSamplingGraph", (), {})
multiprocessing.get_context = _get_context
dgl.data.CitationGraphDataset = _citations
dglx_dist.compat.install()
dgl.distributed.DistGraphServer = Server

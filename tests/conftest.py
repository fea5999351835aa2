"""What all tests share: one compute thread, as the machines that run them are small."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def worker_zip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole package of a worker, NumPy and pyzmq included; written once, for it takes seconds."""
    from dglx_dist.offload.package import Package, write_zip

    return write_zip(tmp_path_factory.mktemp("package") / "worker.zip", Package()).path

"""What all tests share: one compute thread, as the machines that run them are small."""

from __future__ import annotations

import pytest
import torch

from dglx_dist.offload.package import Package, Packed, write_zip

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def worker_package(tmp_path_factory: pytest.TempPathFactory) -> Packed:
    """The whole package of a worker, NumPy and pyzmq included; written once, for it takes seconds."""
    return write_zip(tmp_path_factory.mktemp("package") / "worker.zip", Package())

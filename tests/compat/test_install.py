"""Both ways in: names are rebound where DGL has loaded its own package, else a module takes its place."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

REBOUND = """
import dglx_dist, dgl
from dgl.distributed import dist_context, kvstore, role, rpc
stock = dgl.distributed.DistGraph, dgl.dataloading.DistNodeDataLoader, role.get_rank
pull, plain = kvstore.default_pull_handler, dgl.dataloading.DistDataLoader
import dglx_dist.compat
from dglx_dist.compat.dist_graph import DistGraph
from dglx_dist.compat.dataloading import DistNodeDataLoader
installed = dglx_dist.compat.install()
from dgl.distributed import DistGraph as found, DistNodeDataLoader as later, RangePartitionBook
from dgl.distributed.dist_graph import DistGraph as inner
from dgl.distributed.optim import SparseAdam
import dgl.distributed.nn
# Whose loader of one machine says that it is not for this graph.
assert dgl.dataloading.dataloader.DistGraph is dgl.dataloading.DistGraph is DistGraph
assert dgl.dataloading.DistDataLoader is dgl.distributed.DistDataLoader is not plain
assert found is inner is DistGraph and later is dgl.dataloading.DistNodeDataLoader is DistNodeDataLoader
assert SparseAdam.__module__ == "dglx_dist.compat.dist_tensor"
assert dgl.distributed.nn.DistEmbedding is dgl.distributed.DistEmbedding
assert dgl.distributed.graph_partition_book.RangePartitionBook is RangePartitionBook
# What submodules alone have asks this run, or is refused.
assert (role.get_rank("default"), role.get_trainer_rank(), role.get_num_trainers()) == (0, 0, 1)
assert not dist_context.is_initialized() and kvstore.get_kvstore() is None
assert kvstore.default_pull_handler is pull and dgl.distributed.constants.DEFAULT_NTYPE == "_N"
for gone in (role.init_role, rpc.set_num_server, dist_context.finalize_client, kvstore.init_kvstore):
    try:
        gone(1)
    except dglx_dist.errors.ConfigError as error:
        assert gone.__name__ in str(error)
    else:
        raise AssertionError(gone)
with dglx_dist.compat.install():
    pass
assert dgl.distributed.DistGraph is DistGraph
installed.undo()
assert dgl.dataloading.DistDataLoader is plain
assert (dgl.distributed.DistGraph, dgl.dataloading.DistNodeDataLoader, role.get_rank) == stock[:3]
assert not hasattr(dgl.distributed, "DistNodeDataLoader")
"""

TAKEN = """
import sys, importlib.abc
import dglx_dist, dgl, dgl.dataloading
# As from DGL 2.4 on: import dgl does not load the package, and with a current PyTorch it cannot be loaded.
for name in [name for name in sys.modules if name.startswith("dgl.distributed")]:
    del sys.modules[name]
del dgl.distributed, dgl.dataloading.DistNodeDataLoader, dgl.dataloading.DistEdgeDataLoader
class Refuses(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "dgl.distributed" or name.startswith("dgl.distributed."):
            raise ImportError(f"{name} cannot be loaded")
sys.meta_path.insert(0, Refuses())
import dglx_dist.compat, dglx_dist.api
assert "dgl.distributed" not in sys.modules
installed = dglx_dist.compat.install()
import dgl.distributed
from dgl.distributed import DistEmbedding, DistNodeDataLoader, initialize, optim
from dgl.distributed.optim import SparseAdagrad
from dgl.distributed.nn import DistEmbedding as same
from dgl.distributed.constants import DEFAULT_ETYPE, DEFAULT_NTYPE
from dgl.dataloading import DistEdgeDataLoader
assert dgl.distributed.DistEdgeDataLoader is DistEdgeDataLoader and same is DistEmbedding
assert initialize.__module__ == "dglx_dist.compat.namespace" and optim.SparseAdagrad is SparseAdagrad
for missing in ("kvstore", "dist_graph"):
    try:
        __import__(f"dgl.distributed.{missing}")
    except ImportError as error:
        assert missing in str(error)
    else:
        raise AssertionError(missing)
installed.undo()
assert "dgl.distributed" not in sys.modules and not hasattr(dgl, "distributed")
"""


def run(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.wide
def test_names_are_rebound_where_dgl_has_loaded_its_package() -> None:
    run(REBOUND)


def test_the_place_is_taken_before_it_is_imported() -> None:
    run(TAKEN)

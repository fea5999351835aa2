"""What stands in for ``dgl.dataloading``: everything that works, and a reason for what does not."""

import importlib

import pytest

import dglx_dist as dx
from dglx_dist import dataloading


def test_loaders_are_ours() -> None:
    assert dataloading.DataLoader is dx.DataLoader
    assert dataloading.DistEdgeDataLoader is dx.DistEdgeDataLoader


def test_what_does_not_work_says_so_when_it_is_imported() -> None:
    module = importlib.import_module("dglx_dist.dataloading")
    with pytest.raises(ImportError, match=r"ShaDowKHopSampler .* import it from dgl\.dataloading"):
        _ = module.ShaDowKHopSampler
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = module.no_such_thing

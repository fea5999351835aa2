import dgl
import numpy as np
import torch

from dglx_dist.dataloading.feature_fetch import Columns, Fetch, edges_of
from dglx_dist.graph.dist_graph import DistGraph


def test_columns_land_where_they_belong(graph: DistGraph) -> None:
    # Sources 5, 9, 2 of the destination 5, by the edges 7 and 3.
    block = dgl.create_block(([1, 2], [0, 0]), num_src_nodes=3, num_dst_nodes=1)
    block.edata[dgl.EID] = torch.tensor([7, 3])
    keys = {name: graph.ndata[name].kvstore_key for name in ("feat", "label")}
    columns = Columns(
        inputs={"_N": {"feat": keys["feat"]}},
        targets={"_N": {"label": keys["label"]}},
        edges={("_N", "_E", "_N"): {"source": graph.edata["source"].kvstore_key}},
    )
    fetch = Fetch(graph.kvstore, columns)
    fetch.start({"_N": np.array([5, 9, 2])}, {"_N": np.array([5])}, [edges_of(block)])
    fetch.finish([block], {"_N": {"ready": torch.tensor([1, 2, 3])}})
    assert block.srcdata["feat"][:, 0].tolist() == [5, 9, 2]
    assert block.srcdata["ready"].tolist() == [1, 2, 3]
    assert block.dstdata["label"].tolist() == [5]
    assert torch.equal(block.edata["source"], graph.edata["source"][torch.tensor([7, 3])])

"""A rank of PyG as its users run it: the whole graph in every process, NeighborLoader and DDP."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from scripts.bench.peers.loop import Clock, Trainer, read_arguments, train
from scripts.bench.peers.workload import Workload

# Not installed everywhere, so checkers of types do not know it.
pyg_data = import_module("torch_geometric.data")
pyg_loader = import_module("torch_geometric.loader")
pyg_nn = import_module("torch_geometric.nn")
pyg_utils = import_module("torch_geometric.utils")


class Sage(nn.Module):
    """GraphSAGE with the mean of the neighbours, as the model of the systems on DGL."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        hops = len(workload.fanouts)
        widths = [workload.features, *[workload.hidden] * (hops - 1), workload.classes]
        self.layers = nn.ModuleList(pyg_nn.SAGEConv(a, b, aggr="mean") for a, b in pairwise(widths))

    def forward(self, batch: Any) -> Tensor:
        """Map the rows of ``batch`` to scores of its seeds, which come first."""
        h, edges = batch.x, batch.edge_index
        for number, layer in enumerate(self.layers):
            if "num_sampled_nodes" in batch:
                # Leaves out nodes whose rows this layer need not make any more.
                h, edges, _ = pyg_utils.trim_to_layer(
                    number, batch.num_sampled_nodes, batch.num_sampled_edges, h, edges
                )
            h = layer(h, edges)
            if number < len(self.layers) - 1:
                h = torch.relu(h)
        return h[: batch.batch_size]


class PyG(Trainer):
    """The whole graph in every process."""

    def __init__(self, workload: Workload, folder: Path, options: Mapping[str, Any]) -> None:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        data = pyg_data.Data(
            x=_load(folder, "feat"), y=_load(folder, "label"), edge_index=_load(folder, "edge_index")
        )
        nodes = _load(folder, "train_mask").nonzero().flatten()
        # Equal shares, as PyG's examples cut them: no rank has a batch more than another.
        share = len(nodes) // world_size
        workers = int(options.get("workers", 0))
        self.loader = pyg_loader.NeighborLoader(
            data,
            num_neighbors=list(reversed(workload.fanouts)),
            input_nodes=nodes[rank * share : (rank + 1) * share],
            batch_size=workload.batch_size,
            shuffle=True,
            num_workers=workers,
            persistent_workers=workers > 0,
        )
        self.sampled = "wait" if workers else "sample and slice"
        torch.manual_seed(0)
        self.model = nn.parallel.DistributedDataParallel(Sage(workload))
        self.optimizers = [torch.optim.Adam(self.model.parameters(), lr=workload.lr)]

    def inputs(self, batch: Any, clock: Clock) -> tuple[tuple[Any, ...], Tensor]:
        return (batch,), batch.y[: batch.batch_size]

    def note(self, clock: Clock, batch: Any) -> None:
        clock.count("input_rows", batch.num_nodes)
        clock.count("edges", batch.num_edges)


def main() -> None:
    arguments = read_arguments()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train(PyG(arguments.launch.workload, Path(arguments.launch.data), arguments.launch.options), arguments)
    dist.destroy_process_group()


def _load(folder: Path, name: str) -> Tensor:
    return torch.from_numpy(np.load(folder / f"{name}.npy"))


if __name__ == "__main__":
    main()

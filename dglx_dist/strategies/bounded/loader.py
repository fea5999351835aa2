"""What stands for a loader where all training nodes are trained on at once: who they are."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn, final

import numpy as np
import torch

from dglx_dist.cluster.collectives import sum_over_ranks
from dglx_dist.errors import CheckpointError, ConfigError
from dglx_dist.graph.dist_tensor import DistTensor
from dglx_dist.graph.ids import Ids
from dglx_dist.graph.opening import together
from dglx_dist.graph.owners import RowOwners
from dglx_dist.records import Array
from dglx_dist.sampling.items import Items, read_items
from dglx_dist.sampling.loader import LoaderTimes
from dglx_dist.sampling.neighbor import read_sampler

if TYPE_CHECKING:
    from dglx_dist.graph import DistGraph

OWN_LOOP = (
    "under strategy 'lambda' epochs of different parts of the graph overlap, so no loop can own a step; call "
    "dx.fit(model, g, ...), or use strategy='data_parallel' for a loop of your own"
)
_NEEDLESS = ("batch_size", "shuffle", "drop_last", "seed", "depth", "num_threads", "device")


@final
class IntervalLoader:
    """The training nodes of all ranks; ``dx.fit`` takes it as it takes any loader. One step per epoch.

    Args:
        g: The distributed graph, of one node and edge type.
        indices: This rank's training nodes: (K,) ids or a mask; K may be 0. No node on two ranks.
        sampler: Of ``dgl.dataloading``, with all in-neighbours: ``MultiLayerFullNeighborSampler``.
        options: Of a loader; those that say how batches are made are warned about.

    Raises:
        ConfigError: on all ranks, when on one the sampler draws some in-neighbours only, an option is unknown
            or changes what is trained, or a node is given twice; or the graph has several types.
    """

    def __init__(self, g: DistGraph, indices: Ids, sampler: Any, options: Mapping[str, Any]) -> None:
        check_types(g)
        self.g, self._epoch = g, 0
        self._seeds: Items[str] = together(
            g.session, lambda: _checked(g, indices, sampler, options), ConfigError
        )

    def __len__(self) -> int:
        """Return 1, the steps of an epoch."""
        return 1

    def __iter__(self) -> Iterator[Any]:
        """Refuse.

        Raises:
            ConfigError: always; the message says what to call.
        """
        raise ConfigError(OWN_LOOP)

    def times(self, *, reset: bool = False) -> LoaderTimes:
        """Return no seconds: nothing is loaded."""
        return LoaderTimes()

    def state_dict(self) -> dict[str, int]:
        """Return the position as JSON values, which other loaders know as theirs."""
        return {"epoch": self._epoch, "step": 0, "seed": self.g.session.seed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after whole epochs.

        Raises:
            CheckpointError: the position is inside an epoch, or none at all.
        """
        epoch, step = (state.get(name) if isinstance(state, Mapping) else None for name in ("epoch", "step"))
        if not isinstance(epoch, int) or step != 0:
            raise CheckpointError(
                f"{state!r} is no position between epochs; load a checkpoint that was saved after one"
            )
        self._epoch = epoch

    def advance(self, epochs: int) -> None:
        """Note that so many more epochs are done."""
        self._epoch += epochs

    def own_targets(self) -> tuple[Array, int]:
        """Return which of the rank's own nodes are trained on, and how many all ranks have; collective.

        Sends 8 bytes per node that another rank owns, and its mark.

        Returns:
            (n,) bool over the rows that :class:`~dglx_dist.graph.owners.RowOwners` gives this rank, and M.

        Raises:
            ConfigError: on all ranks: two of them have the same node, or there is none at all.
        """
        g, (ntype,) = self.g, self.g.ntypes
        policy = g.get_node_partition_policy(ntype)
        mine = self._seeds.ids[ntype]
        marks = DistTensor((g.num_nodes(ntype),), torch.int64, part_policy=policy, is_gdata=False, graph=g)
        marks.push(torch.from_numpy(mine), torch.ones(len(mine), dtype=torch.int64), accumulate=True)
        g.barrier()
        first, last = RowOwners(policy.bounds, g.session.topology).range_of(g.session.topology.rank)
        found: Array = marks[torch.arange(first, last)].numpy()
        marks.delete()
        together(g.session, lambda: _check_once(found, first), ConfigError)
        count = torch.tensor([int(found.sum())])
        number = int(sum_over_ranks(count, g.session, phase="control")[0])
        if number == 0:
            raise ConfigError(
                "no rank has a training node; pass the loader dx.node_split(g.ndata['train_mask'])"
            )
        return found > 0, number


def check_types(g: DistGraph) -> None:
    """Raise ConfigError unless there is one node type and one edge type."""
    if len(g.ntypes) != 1 or len(g.canonical_etypes) != 1:
        raise ConfigError(
            f"strategy 'lambda' trains on graphs of one node and one edge type, and this one has "
            f"{', '.join(g.ntypes)} and {len(g.canonical_etypes)} edge types; use strategy='data_parallel'"
        )


def _checked(g: DistGraph, indices: Ids, sampler: Any, options: Mapping[str, Any]) -> Items[str]:
    plan = read_sampler(sampler)
    if plan.fanouts is None:
        _refuse(f"{type(sampler).__name__} makes blocks by its own code")
    if any(fanout != -1 for fanout in plan.fanouts):
        _refuse(f"the sampler draws {list(plan.fanouts)} in-neighbours per layer")
    given = {name: value for name, value in options.items() if value is not None}
    for name in given:
        if name not in _NEEDLESS:
            raise ConfigError(
                f"loader option {name!r} is none of strategy 'lambda', which trains on the whole graph at "
                "once; leave it out, or use strategy='data_parallel'"
            )
    if given:
        told = ", ".join(f"{name}={value!r}" for name, value in given.items())
        warnings.warn(
            f"{told}: without effect, for strategy 'lambda' takes all training nodes in every step",
            stacklevel=2,
        )
    return read_items(indices, {ntype: g.num_nodes(ntype) for ntype in g.ntypes}, "node")


def _refuse(what: str) -> NoReturn:
    raise ConfigError(
        f"{what}, and strategy 'lambda' takes all of them, of all training nodes in every step; give it "
        "dgl.dataloading.MultiLayerFullNeighborSampler(layers) (leave fanouts= and --fanout out), or use "
        "strategy='data_parallel'"
    )


def _check_once(counts: Array, first: int) -> None:
    twice = np.flatnonzero(counts > 1)
    if len(twice):
        raise ConfigError(
            f"node {first + int(twice[0])} is a training node of {int(counts[twice[0]])} ranks; give each to "
            "one, as dx.node_split(mask) does"
        )

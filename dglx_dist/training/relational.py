"""R-GCN and HGT for graphs with several node or edge types.

Both map ``{node type: (num_src, width)}`` rows for the input-most block's sources to ``{node type: (num_dst,
out_dim)}``. For a graph with one node type, input and output may be tensors.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeAlias, final

import dgl
import torch
from dgl.heterograph import DGLBlock
from dgl.nn.pytorch.utils import WeightBasis
from torch import Tensor, nn
from torch.nn import functional as F

from dglx_dist.dataloading.feature_fetch import HALVES
from dglx_dist.errors import ConfigError
from dglx_dist.graph.dist_tensor import DistTensor
from dglx_dist.internals.message_passing import create_block
from dglx_dist.layers.base import PartialSums, SplitsTypes, SplittableConv, StageInput
from dglx_dist.layers.dropout import drop_rows, make_type_keys
from dglx_dist.layers.several_types import check_width, make_typed_input
from dglx_dist.records import FEATURE, EdgeType
from dglx_dist.training.model_kinds import KINDS
from dglx_dist.training.models import Layered

if TYPE_CHECKING:
    from dglx_dist.graph.dist_graph import DistGraph
    from dglx_dist.graph.embedding import DistEmbedding
    from dglx_dist.training.config import ModelConfig


@final
class EntityInputs:
    """Provides a batch's input rows for every node type. Not collective.

    Args:
        feature: Node data on the types that have it.
        embeddings: By node type, an embedding that takes precedence over features. With one node type, its
            name is ``g.ntypes[0]``.
        as_tensor: Whether models get the only node type's rows as a tensor, not as a dictionary.

    Raises:
        ConfigError: If a type has neither, its features are not (N, F), or an embedding has an unknown type
            or does not have one row per node.
    """

    def __init__(
        self,
        g: DistGraph,
        *,
        feature: str = FEATURE,
        embeddings: Mapping[str, DistEmbedding] | None = None,
        as_tensor: bool = False,
    ) -> None:
        self._g = g
        self.feature = feature
        self._as_tensor = as_tensor
        self._embeddings = dict(embeddings or {})
        for ntype, embedding in self._embeddings.items():
            if len(embedding.weight) != g.get_node_partition_policy(ntype).get_size():
                raise ConfigError(
                    f"the embedding of {ntype!r} has {len(embedding.weight)} rows for {g.num_nodes(ntype)} "
                    "nodes. Create it with num_embeddings=g.num_nodes(ntype)."
                )

        for ntype in g.ntypes:
            if ntype not in self._embeddings and feature not in g.nodes[ntype].data:
                raise ConfigError(
                    f"nodes of type {ntype!r} have no tensor {feature!r}. Add a DistEmbedding for them with "
                    f"embeddings={{{ntype!r}: ...}}."
                )

        for ntype, tensor in self._tensors().items():
            if len(tensor.shape) != 2:
                raise ConfigError(f"{feature!r} of {ntype!r} must be (N, F), not {tuple(tensor.shape)}")

    @property
    def feature_widths(self) -> dict[str, int]:
        """Number of feature columns for the types without an embedding."""
        return {
            ntype: self._g.nodes[ntype].data[self.feature].shape[1]
            for ntype in self._g.ntypes
            if ntype not in self._embeddings
        }

    @property
    def tensors(self) -> Any:
        """All rows for every type, as ``inputs`` for :func:`layerwise_inference`."""
        rows = self._tensors()
        return rows[self._g.ntypes[0]] if self._as_tensor else rows

    def _tensors(self) -> dict[str, DistTensor]:
        tensors = {}
        for ntype in self._g.ntypes:
            if ntype in self._embeddings:
                tensors[ntype] = self._embeddings[ntype].weight
            else:
                tensors[ntype] = self._g.nodes[ntype].data[self.feature]
        return tensors

    def drop_gradients(self) -> None:
        """Drop the gradients in all embeddings."""
        for embedding in self._embeddings.values():
            embedding.reset_trace()

    def __call__(self, block: Any) -> Any:
        """Return {node type: (num_src, width)} for the input-most block. Fetch missing features."""
        rows = {ntype: self._rows(block, ntype) for ntype in block.srctypes}
        return rows[block.srctypes[0]] if self._as_tensor else rows

    def _rows(self, block: Any, ntype: str) -> Tensor:
        data = block.srcnodes[ntype].data
        if ntype in self._embeddings:
            return self._embeddings[ntype](data[dgl.NID], block.device)
        if self.feature in data:
            return data[self.feature]
        rows = self._g.nodes[ntype].data[self.feature][data[dgl.NID]]
        # Loaders convert half-precision rows too.
        return rows.float() if rows.dtype in HALVES else rows


def _merge_types(
    block: Any, num_dst: Mapping[str, int], etypes: Sequence[EdgeType]
) -> tuple[Any, Tensor, Tensor]:
    """Merge a block to one node type and one edge type. Sources begin with the destinations, type by type.

    Returns:
        The merged block, the sources' node type indices, (num_src,) int64, and the edges' type indices, (E,)
            int64.
    """
    # The merged sources are all types' destinations, and then all types' other sources.
    num_other = {ntype: block.num_src_nodes(ntype) - count for ntype, count in num_dst.items()}
    total_dst = sum(num_dst.values())
    first_dst = _accumulate_starts(num_dst, 0)
    first_other = _accumulate_starts(num_other, total_dst)

    sources = []
    destinations = []
    edge_types = []
    for index, (source, relation, destination) in enumerate(etypes):
        u, v = (ends.long() for ends in block.edges(etype=(source, relation, destination)))
        index_of_dst = u + first_dst[source]
        index_of_other = u - num_dst[source] + first_other[source]
        sources.append(torch.where(u < num_dst[source], index_of_dst, index_of_other))
        destinations.append(v + first_dst[destination])
        edge_types.append(torch.full_like(u, index))

    num_src = total_dst + sum(num_other.values())
    ends = torch.cat(destinations), torch.cat(sources)
    merged = create_block("coo", *ends, num_src=num_src, num_dst=total_dst)

    # A tensor with counts is avoided, because copying it to a device would block.
    node_types = []
    for counts in (num_dst, num_other):
        for index, count in enumerate(counts.values()):
            node_types.append(torch.full((count,), index, device=block.device))
    return merged, torch.cat(node_types), torch.cat(edge_types)


def _split_by_type(rows: Tensor, num_dst: Mapping[str, int]) -> dict[str, Tensor]:
    return dict(zip(num_dst, torch.split(rows, list(num_dst.values())), strict=True))


def _accumulate_starts(counts: Mapping[str, int], first: int) -> dict[str, int]:
    return dict(zip(counts, accumulate(counts.values(), initial=first), strict=False))


Rows: TypeAlias = dict[str, Tensor]


def make_module_name(kind: str | EdgeType) -> str:
    """Return a module name for a type, without dots and different from any ModuleDict attribute."""
    name = str(kind).replace("%", "%25").replace(".", "%2E")
    return f"%{name}" if hasattr(nn.ModuleDict(), name) else name


class RelationalModel(Layered):
    """Input projections, followed by layers over the blocks.

    Args:
        feature_widths: Number of feature columns by node type. A linear layer maps them to ``hidden``. Rows
            for other types (embeddings) are used directly and must have width ``hidden``.
        hidden: Width between the layers.
        layers: Number of blocks.
        out_types: Node types in the result. None: all.

    Raises:
        ConfigError: If a number is below 1, or a type does not exist. In ``forward``: if an embedding's rows
            do not have width ``hidden``.
    """

    def __init__(
        self,
        graph: DistGraph | dgl.DGLGraph,
        feature_widths: Mapping[str, int],
        hidden: int,
        layers: int,
        out_types: Sequence[str] | None,
    ) -> None:
        super().__init__()
        if min(hidden, layers, *feature_widths.values()) < 1:
            raise ConfigError(
                f"widths and layers must be at least 1, but are hidden={hidden}, layers={layers}, "
                f"feature_widths={dict(feature_widths)}"
            )

        # Sorted, because DGLGraph and DistGraph list types in different orders.
        self.ntypes = tuple(sorted(graph.ntypes))
        self.etypes = tuple(sorted(graph.canonical_etypes))
        for ntype in (*feature_widths, *(out_types or ())):
            if ntype not in self.ntypes:
                raise ConfigError(f"there is no node type {ntype!r} (known: {', '.join(self.ntypes)})")
        self.hidden, self.num_layers = hidden, layers
        self.out_types = self.ntypes if out_types is None else tuple(out_types)
        self.project = nn.ModuleDict(
            {make_module_name(ntype): nn.Linear(width, hidden) for ntype, width in feature_widths.items()}
        )

    @abstractmethod
    def apply_layer(self, depth: int, block: Any, h: Rows) -> Rows:
        """Map (num_src, hidden) rows for every type to (num_dst, ...) rows for the destinations."""

    def _layer(self, depth: int, block: Any, h: Rows | Tensor) -> Rows | Tensor:
        rows = {self.ntypes[0]: h} if isinstance(h, Tensor) else dict(h)
        for ntype in self.ntypes:
            if ntype not in rows:
                raise ConfigError(
                    f"layer {depth} was not given the rows of node type {ntype!r}. Pass the rows of all node "
                    f"types ({', '.join(self.ntypes)})."
                )

        if depth:
            rows = self.apply_layer(depth, block, _complete_sources(block, rows))
        else:
            rows = self.apply_first_layer(block, rows)

        if depth == self.num_layers - 1:
            rows = {ntype: type_rows for ntype, type_rows in rows.items() if ntype in self.out_types}
        return rows[self.ntypes[0]] if isinstance(h, Tensor) else rows

    def apply_first_layer(self, block: Any, h: Rows) -> Rows:
        """Map the input rows for every type to (num_dst, ...) rows for the destinations."""
        rows = {ntype: self.project_rows(ntype, x) for ntype, x in h.items()}
        return self.apply_layer(0, block, _complete_sources(block, rows))

    def project_rows(self, ntype: str, rows: Tensor) -> Tensor:
        """Project one type's input rows to (n, hidden)."""
        name = make_module_name(ntype)
        if name in self.project:
            return self.project[name](rows)
        if rows.shape[1] != self.hidden:
            raise ConfigError(
                f"rows of {ntype!r} have width {rows.shape[1]} and no projection. Use an embedding of width "
                f"{self.hidden}, or set the width in feature_widths."
            )

        return rows


def _complete_sources(block: Any, h: Rows) -> Rows:
    """Return the rows for all sources. If a block has sources on other ranks, their rows are fetched.

    Raises ConfigError if ``block`` has another number of sources.
    """
    exchange_rows: Callable[[Any], Any] | None = getattr(block, "all_rows", None)
    if exchange_rows is not None:
        if len(block.srctypes) == len(block.etypes) == 1:
            return {ntype: exchange_rows(x) for ntype, x in h.items()}
        complete_rows: Rows = exchange_rows(h)
        return complete_rows

    for ntype, x in h.items():
        if len(x) != block.num_src_nodes(ntype):
            raise ConfigError(
                f"a layer was given {len(x)} rows of node type {ntype!r} for {block.num_src_nodes(ntype)} "
                "sources of its block. Pass the rows of the block's sources."
            )
    return h


def build_relational(
    config: ModelConfig,
    graph: DistGraph,
    feature_widths: Mapping[str, int],
    out_dim: int,
    out_types: Sequence[str] | None,
    **options: Any,
) -> RelationalModel:
    """Build the ready-made model for several types that ``config`` names. ``options`` add to its own."""
    kind = KINDS[config.model]
    options |= {name: getattr(config, name) for name in kind.options}
    options |= {"layers": config.layers, "out_types": out_types}
    model: RelationalModel = kind.build(graph, feature_widths, config.hidden, out_dim, **options)
    return model


@final
class RGCN(RelationalModel, SplitsTypes):
    """Relational graph convolution (Schlichtkrull et al. 2018): a mean per relation.

    ``h_v = W_0 h_v + b + sum_r mean over N_r(v) of W_r h_u``, with a W_0 and b per node type. A relation
    without edges into a destination contributes nothing to it.

    Args, in addition to those in :class:`RelationalModel`:
        out_dim: Width of the result.
        num_bases: How many weight matrices relations share and mix. None: each relation has its own.
        dropout: Probability, after the activation between layers.
        norm: ``layer`` adds a LayerNorm per node type before that activation.
        residual: Whether layers except the first and the last one add their input.

    Raises:
        ConfigError: If a number is out of range, ``norm`` is unknown, a type does not exist, or ``num_bases``
            is set for a graph with two edge types that have the same relation name.
    """

    def __init__(  # noqa: PLR0913 - all but four have defaults
        self,
        graph: DistGraph | dgl.DGLGraph,
        feature_widths: Mapping[str, int],
        hidden: int,
        out_dim: int,
        *,
        layers: int = 2,
        num_bases: int | None = None,
        dropout: float = 0.0,
        norm: str = "none",
        residual: bool = False,
        out_types: Sequence[str] | None = None,
    ) -> None:
        super().__init__(graph, feature_widths, hidden, layers, out_types)
        if norm not in ("none", "layer"):
            raise ConfigError(f"norm={norm!r} must be none or layer")
        relations = [relation for _, relation, _ in self.etypes]
        if num_bases is not None and (num_bases < 1 or len(set(relations)) != len(relations)):
            raise ConfigError(
                f"num_bases={num_bases} must be at least 1 and needs a distinct relation name per edge type "
                f"(there are {len(relations)} types of {len(set(relations))} names)"
            )

        widths = [hidden] * layers + [out_dim]
        self.weights = nn.ParameterList()
        self.own = nn.ModuleList()
        self.bases = nn.ModuleList()
        for depth in range(layers):
            into = widths[depth]
            out = widths[depth + 1]
            if num_bases is None:
                weights = torch.empty(len(relations), into, out)
                for weight in weights:
                    nn.init.xavier_uniform_(weight)
                self.weights.append(nn.Parameter(weights))

            linears = {make_module_name(ntype): nn.Linear(into, out) for ntype in self.ntypes}
            self.own.append(nn.ModuleDict(linears))
            if num_bases is not None:
                self.bases.append(WeightBasis((into, out), num_bases, len(relations)))

        self.dropout = nn.Dropout(dropout)
        self._residual = residual
        self.norms = nn.ModuleList(
            nn.ModuleDict({make_module_name(ntype): nn.LayerNorm(hidden) for ntype in self.ntypes})
            for _ in range((layers - 1) * (norm == "layer"))
        )

    def make_first_stages(self, widths: Mapping[str, int]) -> SplittableConv:
        return RgcnStages(self, widths)

    def apply_layer(self, depth: int, block: Any, h: Rows) -> Rows:
        num_dst = self.count_destinations(depth, block)
        rows = self.sum_relations(depth, block, h, num_dst)
        return self.finish_layer(depth, block, h, rows, num_dst)

    def list_result_types(self, depth: int) -> list[str]:
        """Return the node types for which a layer returns rows."""
        is_last = depth == self.num_layers - 1
        return [ntype for ntype in self.ntypes if ntype in self.out_types or not is_last]

    def count_destinations(self, depth: int, block: Any) -> dict[str, int]:
        """Return how many rows a layer returns for each type."""
        return {ntype: block.num_dst_nodes(ntype) for ntype in self.list_result_types(depth)}

    def sum_relations(
        self, depth: int, block: Any, h: Rows, num_dst: Mapping[str, int], *, bias: bool = True
    ) -> Tensor:
        """Return own rows plus the means over all relations, type by type. Types not in ``h`` add nothing."""
        linears: Any = self.own[depth]
        own_rows = []
        for ntype, count in num_dst.items():
            linear = linears[make_module_name(ntype)]
            x = h[ntype][:count] if ntype in h else linear.weight.new_zeros(0, linear.in_features)
            product = linear(x) if bias else F.linear(x, linear.weight)
            if ntype not in h:
                # Zeros have the products' dtype too, because autocast chooses it.
                product = product.new_zeros(count, linear.out_features)
            own_rows.append(product)

        rows = torch.cat(own_rows)

        ntypes = [ntype for ntype in self.ntypes if ntype in h]
        merged_edges = _merge_relations(block, ntypes, self.etypes, num_dst)
        if merged_edges is None:
            return rows
        merged, sizes, targets = merged_edges
        means = dgl.ops.copy_u_mean(merged, torch.cat([h[ntype] for ntype in ntypes]))

        # Each relation maps the means over its edges.
        weights = self.bases[depth]() if len(self.bases) else self.weights[depth]
        means_by_relation = torch.split(means, list(sizes.values()))
        products = []
        for relation, relation_means in zip(sizes, means_by_relation, strict=True):
            products.append(relation_means @ weights[relation])
        return rows.index_add(0, targets, torch.cat(products))

    def finish_layer(self, depth: int, block: Any, h: Rows, rows: Tensor, num_dst: Mapping[str, int]) -> Rows:
        """Return the rows by type. Inner layers apply residual connection, norm, activation and dropout."""
        if depth == self.num_layers - 1:
            return _split_by_type(rows, num_dst)
        if self._residual and depth:
            rows = rows + torch.cat([h[ntype][:count] for ntype, count in num_dst.items()])
        if self.norms:
            norms: Any = self.norms[depth]
            by_type = _split_by_type(rows, num_dst).items()
            rows = torch.cat([norms[make_module_name(ntype)](x) for ntype, x in by_type])

        keys = make_type_keys(block.dstnodes, list(num_dst))
        return _split_by_type(drop_rows(self.dropout, torch.relu(rows), keys), num_dst)


@final
class RgcnStages(SplittableConv):
    """Stages for the projections and the first layer in :class:`RGCN`.

    The projections are cut. Other weights before the activation are linear in the projected rows, so every
    part applies them to its share. The part that owns a block also adds the projections' biases, and the rows
    for types that are not cut.
    """

    replaced = "apply_first_layer"
    edge_arguments = ()

    def __init__(self, model: RGCN, widths: Mapping[str, int]) -> None:
        super().__init__(model)
        # The tuple keeps the model from being registered as a submodule.
        self._model = (model,)
        names = {ntype: make_module_name(ntype) for ntype in model.ntypes}
        self.cut_types = {
            f"project.{name}.weight": ntype
            for ntype, name in names.items()
            if name in model.project and ntype in widths
        }
        if not self.cut_types:
            raise ConfigError("no node type that has features has a projection in feature_widths")
        for name, ntype in self.cut_types.items():
            check_width(name, self.get_parameter(name).shape[1], ntype, widths)
        self.cut = dict.fromkeys(self.cut_types, 1)
        self._cut_names = {ntype: names[ntype] for ntype in self.cut_types.values()}
        self.own_types = tuple(ntype for ntype in model.ntypes if ntype not in self._cut_names)
        used_names = [name for name, _ in model.project.named_parameters("project")]
        used_names += [f"own.0.{names[ntype]}.weight" for ntype in model.list_result_types(0)]
        if len(model.bases):
            used_names += [name for name, _ in model.bases[0].named_parameters("bases.0")]
        else:
            used_names.append("weights.0")

        self.shared = tuple(name for name in used_names if name not in self.cut)

    @property
    def sum_widths(self) -> dict[str, int]:
        model = self._model[0]
        linears: Any = model.own[0]
        return {t: linears[make_module_name(t)].out_features for t in model.list_result_types(0)}

    def split_modules(self) -> set[nn.Module]:
        # The model's dropout follows the first layer.
        return set()

    def make_input(
        self, block: DGLBlock, by_type: Mapping[str, StageInput], edges: Mapping[str, Tensor]
    ) -> StageInput:
        return make_typed_input(block, by_type)

    def gather(self, inputs: StageInput, transformed: Tensor, scattered: PartialSums) -> PartialSums:
        """Return a (D1, H) share for each type in the result."""
        model = self._model[0]
        h = {}
        for ntype, end in inputs.by_type.items():
            if ntype in self._cut_names:
                linear: Any = model.project[self._cut_names[ntype]]
                h[ntype] = F.linear(end.x, linear.weight, linear.bias if end.is_own else None)
            elif end.is_own:
                h[ntype] = model.project_rows(ntype, end.x)

        num_dst = model.count_destinations(0, inputs.block)
        rows = model.sum_relations(0, inputs.block, h, num_dst, bias=False)
        return torch.split(rows, list(num_dst.values()))

    def apply_nodes(self, block: DGLBlock, gathered: PartialSums) -> Tensor:
        linears: Any = self._model[0].own[0]
        types = self._model[0].list_result_types(0)
        pairs = zip(gathered, types, strict=True)
        return torch.cat([rows + linears[make_module_name(ntype)].bias for rows, ntype in pairs])

    def forward(self, block: DGLBlock, h: Rows) -> Rows:  # type: ignore[override]  # rows are passed by node type
        model = self._model[0]
        by_type = {ntype: StageInput(block=block, x=h[ntype], edges={}) for ntype in model.ntypes}
        rows = self.apply_nodes(block, self.sync(make_typed_input(block, by_type)))
        return model.finish_layer(0, block, h, rows, model.count_destinations(0, block))


def _merge_relations(
    block: Any, ntypes: Sequence[str], etypes: Sequence[EdgeType], num_dst: Mapping[str, int]
) -> tuple[Any, dict[int, int], Tensor] | None:
    """Merge a block's edges, with a destination for each pair of relation and destination.

    Returns:
        None without edges. Otherwise:

        - A block from all sources, type by type, to the (n,) pairs that have edges, relation by relation.
        - A mapping from each relation with edges, by its index, to the number of its pairs.
        - Each pair's (n,) int64 destination, counted among destinations that have the requested types.
    """
    # One product covers all relations. Separate products would each touch all sources and destinations.
    num_src = {ntype: block.num_src_nodes(ntype) for ntype in ntypes}
    first_src = _accumulate_starts(num_src, 0)
    first_dst = _accumulate_starts(num_dst, 0)
    sources = []
    degrees = []
    targets = []
    sizes = {}
    for relation, etype in enumerate(etypes):
        source, _, destination = etype
        if source not in num_src or destination not in num_dst or not block.num_edges(etype):
            continue
        indptr, indices, _ = block.adj_tensors("csc", etype)
        degree = indptr.diff()
        pairs = _find_destinations(degree)
        sizes[relation] = len(pairs)
        sources.append(indices + first_src[source])
        degrees.append(degree[pairs])
        targets.append(pairs + first_dst[destination])

    if not sizes:
        return None

    all_sources = torch.cat(sources)
    # The merged edges' offsets begin with a 0.
    indptr = F.pad(torch.cat(degrees).cumsum(0, dtype=all_sources.dtype), (1, 0))
    merged = create_block("csc", indptr, all_sources, num_src=sum(num_src.values()), num_dst=len(indptr) - 1)
    return merged, sizes, torch.cat(targets)


def _find_destinations(degree: Tensor) -> Tensor:
    """Return the destinations with edges. On a GPU, return all, because a count would wait for the device."""
    if degree.is_cpu:
        return degree.nonzero(as_tuple=True)[0]
    return torch.arange(len(degree), device=degree.device)


@final
class HGT(RelationalModel):
    """Heterogeneous graph transformer (Hu et al. 2020): ``dgl.nn.HGTConv`` layers, then a linear layer.

    Args, in addition to those in :class:`RelationalModel`:
        out_dim: Width of the result. ``hidden`` is the width over all heads together.
        heads: Number of attention heads. Must divide ``hidden``.
        dropout: Probability inside the convolutions.
    """

    def __init__(
        self,
        graph: DistGraph | dgl.DGLGraph,
        feature_widths: Mapping[str, int],
        hidden: int,
        out_dim: int,
        *,
        layers: int = 2,
        heads: int = 4,
        dropout: float = 0.0,
        out_types: Sequence[str] | None = None,
    ) -> None:
        super().__init__(graph, feature_widths, hidden, layers, out_types)
        if heads < 1 or hidden % heads:
            raise ConfigError(f"heads={heads} must divide hidden={hidden}. Choose another number of heads.")
        self.convs = nn.ModuleList(
            dgl.nn.HGTConv(
                hidden, hidden // heads, heads, len(self.ntypes), len(self.etypes), dropout, use_norm=True
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(hidden, out_dim)

    def apply_layer(self, depth: int, block: Any, h: Rows) -> Rows:
        if depth == 0:
            h = {ntype: F.gelu(rows) for ntype, rows in h.items()}
        num_dst = {ntype: block.num_dst_nodes(ntype) for ntype in self.ntypes}
        dst_rows = [h[ntype][:count] for ntype, count in num_dst.items()]
        other_rows = [h[ntype][count:] for ntype, count in num_dst.items()]
        merged, node_type, edge_type = _merge_types(block, num_dst, self.etypes)
        keys = make_type_keys(block.dstnodes, self.ntypes)
        if keys is not None:
            merged.dstdata[dgl.NID] = keys

        rows = self.convs[depth](merged, torch.cat([*dst_rows, *other_rows]), node_type, edge_type)
        if depth == self.num_layers - 1:
            rows = self.head(rows)
        return _split_by_type(rows, num_dst)

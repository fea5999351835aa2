"""The stages of the graph isomorphism network, for ``dgl.nn.GINConv`` with the aggregators sum and mean."""

from __future__ import annotations

from dgl.heterograph import DGLBlock
from dgl.nn import GINConv
from torch import Tensor, nn
from torch.nn import functional

from dglx_dist.errors import ConfigError
from dglx_dist.layers.aggregate import mean_in_edges, sum_in_edges
from dglx_dist.layers.staged import Staged, StageInput, Sums


class GinStages(Staged):
    """``GINConv`` as stages: its function's first Linear is split, everything after it is applied to sums.

    Args:
        conv: What to split; its parameters are shared, not copied. ``apply_func`` is a Linear or a
            Sequential that begins with one.

    Raises:
        ConfigError: its aggregator is max, or its function begins with something else.
    """

    def __init__(self, conv: GINConv) -> None:
        super().__init__()
        if conv._aggregator_type == "max":
            raise ConfigError(
                "GINConv with aggregator 'max' is not a sum of columns; use 'sum' or 'mean', or "
                "strategy='data_parallel'"
            )
        self.apply_func = conv.apply_func
        first, name = self.apply_func, "apply_func.weight"
        if isinstance(first, nn.Sequential) and len(first):
            first, name = first[0], "apply_func.0.weight"
        if type(first) is not nn.Linear:
            raise ConfigError(
                f"GINConv's apply_func begins with {type(first).__name__}, which is not known to be linear; "
                "give it a torch.nn.Linear, or a torch.nn.Sequential that begins with one, or use "
                "strategy='data_parallel'"
            )
        self.cut = {name: 1}
        # Not registered a second time: state_dict has it under apply_func.
        self._first = (first,)
        self._mean = conv._aggregator_type == "mean"
        self.activation = conv.activation
        if isinstance(conv.eps, nn.Parameter):
            self.eps = conv.eps
        else:
            # A buffer, as in DGL's own layer: so that checkpoints of either have it.
            self.register_buffer("eps", conv.eps)

    def transform(self, given: StageInput) -> Tensor:
        """Project the source rows by the first Linear, without its bias."""
        return functional.linear(given.x, self._first[0].weight)

    def gather(self, given: StageInput, transformed: Tensor, scattered: Sums) -> Sums:
        """Return two (D1, H): what comes over edges, and the node itself, which eps weighs in full."""
        reduce = mean_in_edges if self._mean else sum_in_edges
        around = reduce(given.block, transformed, given.edges.get("edge_weight"))
        own = transformed[: given.block.num_dst_nodes()]
        # A trained eps must see full sums: its gradient would be one part's alone.
        return (around, own) if self.eps.requires_grad else (around + (1 + self.eps) * own,)

    def apply_nodes(self, block: DGLBlock, gathered: Sums) -> Tensor:
        """Add up and add the bias; then the rest of the function, and the activation."""
        around, *own = gathered
        out = around + (1 + self.eps) * own[0] if own else around
        bias = self._first[0].bias
        out = out if bias is None else out + bias
        if isinstance(self.apply_func, nn.Sequential):
            out = self.apply_func[1:](out)
        return out if self.activation is None else self.activation(out)

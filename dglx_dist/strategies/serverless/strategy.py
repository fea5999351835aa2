"""Serverless training as in Dorylus: graph servers, stateless workers, parameter servers, one pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, final

from torch import Tensor, nn

from dglx_dist.comm.session import Session
from dglx_dist.errors import ConfigError
from dglx_dist.graph.shared_memory import warn_about_edges
from dglx_dist.strategies.base import OpenedStrategy, Reduction, Strategy, Traits, WrappedModel
from dglx_dist.strategies.candidate import Candidate, CandidateContext
from dglx_dist.strategies.serverless.options import read_lambda_options

if TYPE_CHECKING:
    from dglx_dist.graph.dist_graph import DistGraph


_EDGE_BYTES = 80
"""Memory in bytes for each edge on a machine's servers, measured with two layers. Workers need more."""
_EPOCHS_FACTORS: Mapping[int, float] = MappingProxyType({0: 1.08, 1: 1.4})
"""Factor on the epochs that the pipeline with barriers needs for equal accuracy, by staleness.

Dorylus reports 1.00 to 1.14 and 1.07 to 1.58.
"""


@final
class OpenedLambda(OpenedStrategy):
    """Serverless training on one graph."""

    def make_loader(self, indices: Tensor, sampler: Any, **loader_options: Any) -> Any:
        from dglx_dist.strategies.serverless.trainer import IntervalLoader

        warn_about_edges(self.session, self.g.edge_bounds, _EDGE_BYTES)
        return IntervalLoader(self.g, indices, sampler, loader_options)

    def make_model(self, model: nn.Module, reduction: Reduction) -> WrappedModel:
        from dglx_dist.strategies.serverless.trainer import LambdaModel

        if reduction != "mean":
            raise ConfigError(
                f"reduction={reduction!r}: strategy 'lambda' trains the mean loss over all training nodes; "
                f"remove reduction={reduction!r}, and adapt the learning rate instead"
            )
        return LambdaModel(model, self.g, self.options)


@final
class Lambda(Strategy):
    """Graph servers on all ranks, and an executor that runs the tensor work on stateless workers.

    The options are the ``LambdaOptions`` fields and the executor's options. See docs/strategies/lambda.md.
    """

    traits = Traits(
        unit="full_graph",
        summary="features of halo nodes once; boundary rows and their gradients; rows and weights to workers",
        own_loop=False,
        on_gpus=False,
        complexity=50,
    )

    read_options = staticmethod(read_lambda_options)

    def __init__(self, session: Session, options: Mapping[str, object]) -> None:
        super().__init__(session, options)
        num_servers = self.options.parameter_servers
        num_ranks = session.topology.world_size
        if num_servers > num_ranks:
            raise ConfigError(
                f"option parameter_servers={num_servers}, but there are {num_ranks} ranks; "
                "give at most as many, or start more ranks"
            )

    def open(self, g: DistGraph) -> OpenedLambda:
        return OpenedLambda(self, g)

    @classmethod
    def candidates(cls, context: CandidateContext) -> Iterator[Candidate]:
        """Yield the pipeline with barriers, and asynchronous pipelines with both staleness bounds."""
        yield Candidate(unit="full_graph")
        for staleness, factor in _EPOCHS_FACTORS.items():
            options = {"mode": "async", "staleness": staleness}
            yield Candidate(unit="full_graph", options=options, exact=False, epochs_factor=factor)

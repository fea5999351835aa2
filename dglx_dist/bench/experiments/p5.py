"""Push-pull with cached column groups (4 to 2)."""

from __future__ import annotations

from dglx_dist.bench.records import Claim, Experiment

EXPERIMENT = Experiment(
    id="P5",
    title="push-pull with cached column groups (4 to 2)",
    suites=("papers",),
    claim=Claim(
        paper="P3 (OSDI 2021)",
        says="caching gains up to 1.7x (3.6x to 5.23x over DGL)",
        setting="4 servers of 4 P100, 10 Gbit/s",
    ),
    prediction=(
        "Bytes of the exchange (2 - 1) / (4 - 1) = 0.33 of P1's, 1.3 to 1.7x faster than P1, for twice the "
        "memory."
    ),
    how=(
        "4 servers with links of a limited rate, features of 100 columns, fan-out 25,10; nodes and batch "
        "are chosen so that a batch has about 7 input rows for each row of layer 1. Both strategies train "
        "on the same seeds and the same sampled blocks."
    ),
    strategies=("push_pull",),
)

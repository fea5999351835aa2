"""Push-pull with its pipeline of depth 3."""

from __future__ import annotations

from dglx_dist.bench.records import Claim, Experiment

EXPERIMENT = Experiment(
    id="P2",
    title="push-pull with its pipeline of depth 3",
    suites=("papers",),
    claim=Claim(
        paper="P3 (OSDI 2021)",
        says="pipelining gains 30 to 50 %",
        setting="4 servers of 4 P100, 10 Gbit/s",
    ),
    prediction=(
        "Over hashed data parallelism at phi 0.8 at most 4.7 to 5x, 2.9 to 3.7x, 1.6 to 1.9x and 1.1x at "
        "hidden widths 16, 32, 64 and 100: 1.3 to 1.5x on top of P1."
    ),
    how=(
        "4 servers with links of a limited rate, features of 100 columns, fan-out 25,10; nodes and batch "
        "are chosen so that a batch has about 7 input rows for each row of layer 1. Both strategies train "
        "on the same seeds and the same sampled blocks."
    ),
    strategies=("push_pull",),
)

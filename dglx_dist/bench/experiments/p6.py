"""Push-pull beside data parallelism on a METIS partition."""

from __future__ import annotations

from dglx_dist.bench.records import Claim, Experiment

EXPERIMENT = Experiment(
    id="P6",
    title="push-pull beside data parallelism on a METIS partition",
    suites=("papers",),
    claim=Claim(
        paper="P3 (OSDI 2021)",
        says="1.7x faster than DGL on METIS (3.85x than on hash)",
        setting="GraphSAGE, 4 servers of 4 P100, 10 Gbit/s",
    ),
    prediction=(
        "1.0 to 1.7x, by the measured share rho of remote input rows; slower where rho is below 0.15 at "
        "hidden width 16."
    ),
    how=(
        "4 servers with links of a limited rate, features of 100 columns, fan-out 25,10; nodes and batch "
        "are chosen so that a batch has about 7 input rows for each row of layer 1. Both strategies train "
        "on the same seeds and the same sampled blocks."
    ),
    strategies=("push_pull",),
)

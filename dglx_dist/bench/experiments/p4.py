"""Growing features: 16 to 512 columns at hidden width 32."""

from __future__ import annotations

from dglx_dist.bench.records import Claim, Experiment

EXPERIMENT = Experiment(
    id="P4",
    title="growing features: 16 to 512 columns at hidden width 32",
    suites=("papers",),
    claim=Claim(
        paper="P3 (OSDI 2021)",
        says="P3's epoch only doubles from 16 to 512 features; its gain grows to 4.77x",
        setting="4 servers of 4 P100, 10 Gbit/s",
    ),
    prediction=(
        "The baseline's feature bytes grow 32 times, push-pull's stay; its epoch at most doubles while the "
        "baseline's grows many times over."
    ),
    how=(
        "4 servers with links of a limited rate, features of 100 columns, fan-out 25,10; nodes and batch "
        "are chosen so that a batch has about 7 input rows for each row of layer 1. Both strategies train "
        "on the same seeds and the same sampled blocks."
    ),
    strategies=("push_pull",),
)

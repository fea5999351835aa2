"""Push-pull without its pipeline beside hashed data parallelism, by hidden width."""

from __future__ import annotations

from dglx_dist.bench.records import Claim, Experiment

EXPERIMENT = Experiment(
    id="P1",
    title="push-pull without its pipeline beside hashed data parallelism, by hidden width",
    suites=("papers",),
    claim=Claim(
        paper="P3 (OSDI 2021)",
        says=(
            "2.08 to 5.43x faster than DGL with hash partitioning and sampling; the gain shrinks with the "
            "hidden width and turns into a loss"
        ),
        setting="4 servers of 4 P100, 10 Gbit/s, 5 graphs, 4 models",
    ),
    prediction=(
        "Bytes 0.17, 0.34, 0.67 and 1.05 of the baseline's at hidden widths 16, 32, 64 and 100 (+0.10 for "
        "int32 structure). Time at phi 0.8: 2.4 to 3.0x, 1.8 to 2.1x, 1.2 to 1.4x, 0.9x; the sign changes "
        "near a width of 86 to 95."
    ),
    how=(
        "4 servers with links of a limited rate, features of 100 columns, fan-out 25,10; nodes and batch "
        "are chosen so that a batch has about 7 input rows for each row of layer 1. Both strategies train "
        "on the same seeds and the same sampled blocks."
    ),
    strategies=("push_pull",),
)

"""Value: performance per dollar beside CPU servers alone."""

from __future__ import annotations

from dglx_dist.bench.records import Claim, Experiment

EXPERIMENT = Experiment(
    id="Y5",
    title="value: performance per dollar beside CPU servers alone",
    suites=("papers",),
    claim=Claim(
        paper="Dorylus (OSDI 2021)",
        says=(
            "1.17 to 2.56x faster and 1.11 to 2.76x the value of CPU servers alone; friendster 1133 s for "
            "13.8 $ against 1991 s for 15.3 $"
        ),
        setting="graph servers and Lambda on AWS, table 4",
    ),
    prediction=(
        "1.1 to 2.8x the value, by simulation from a price table only; to be labelled simulated cost."
    ),
    how="Measured seconds and calls times a table of prices; cannot be measured on one machine.",
    strategies=("lambda",),
)

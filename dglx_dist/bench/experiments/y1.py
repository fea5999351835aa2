"""Bounded asynchrony: epochs to the same accuracy."""

from __future__ import annotations

from dglx_dist.bench.records import Claim, Experiment

EXPERIMENT = Experiment(
    id="Y1",
    title="bounded asynchrony: epochs to the same accuracy",
    suites=("papers",),
    claim=Claim(
        paper="Dorylus (OSDI 2021)",
        says=(
            "epochs of async over pipe: at staleness 0 1.00, 1.09 and 1.14, at staleness 1 1.07, 1.57 and "
            "1.58"
        ),
        setting="reddit-small, amazon, reddit-large on AWS Lambda",
    ),
    prediction=(
        "1.0 to 1.15 at staleness 0, 1.05 to 1.6 at staleness 1; the same bytes per epoch. Independent of "
        "the hardware."
    ),
    how=(
        "Stateless workers simulated on this machine, a reddit-like graph with communities, 4 to 40 vertex "
        "intervals, at least 5 seeds."
    ),
    strategies=("lambda",),
)

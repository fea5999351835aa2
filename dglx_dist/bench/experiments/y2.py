"""Bounded asynchrony: time per epoch."""

from __future__ import annotations

from dglx_dist.bench.records import Claim, Experiment

EXPERIMENT = Experiment(
    id="Y2",
    title="bounded asynchrony: time per epoch",
    suites=("papers",),
    claim=Claim(
        paper="Dorylus (OSDI 2021)",
        says="async epochs are about 15 % shorter than those of the pipeline with a barrier",
        setting="AWS Lambda",
    ),
    prediction="0.80 to 0.90 of the pipeline's time; the gain vanishes without jitter of the workers.",
    how=("Simulated workers whose latency is lognormal (sigma 0.5), as sleep; the same bytes on both sides."),
    strategies=("lambda",),
)

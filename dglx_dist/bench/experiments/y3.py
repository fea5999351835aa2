"""Tasks one after another beside the pipeline."""

from __future__ import annotations

from dglx_dist.bench.records import Claim, Experiment

EXPERIMENT = Experiment(
    id="Y3",
    title="tasks one after another beside the pipeline",
    suites=("papers",),
    claim=Claim(
        paper="Dorylus (OSDI 2021)",
        says="without the pipeline 1.9x slower",
        setting="amazon on AWS Lambda",
    ),
    prediction="1.5 to 1.9x: the overlap is real on few cores too, since waiting for workers costs none.",
    how=(
        "A worker's time is sleep plus a real transfer by socket at 200 Mbit/s; the same bytes on both sides."
    ),
    strategies=("lambda",),
)

"""Task fusion and rematerialisation."""

from __future__ import annotations

from dglx_dist.bench.records import Claim, Experiment

EXPERIMENT = Experiment(
    id="Y4",
    title="task fusion and rematerialisation",
    suites=("papers",),
    claim=Claim(
        paper="Dorylus (OSDI 2021)",
        says="both save traffic between graph servers and workers; no figure is quoted here",
        setting="AWS Lambda",
    ),
    prediction=(
        "1.1 to 1.4x; rematerialisation halves what the vertex task sends up, fusion saves one round trip."
    ),
    how="Each off and on, on the same workers; bytes by the ledger against the formula.",
    strategies=("lambda",),
)

"""``dglx predict``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dglx_dist.cli.common import command, write
from dglx_dist.comm.topology import is_launched_by_torchrun
from dglx_dist.errors import ConfigError
from dglx_dist.options import check_ranges, option, path_option


@dataclass(frozen=True, kw_only=True)
class PredictCommand:
    """Options of ``dglx predict``. A wrong value raises ConfigError."""

    run: str = path_option(..., "Run folder of `dglx train`.", metavar="RUNDIR")
    out: Path = option(..., "File of the answers, .parquet or .csv.", flag="--out", metavar="FILE")
    nodes: Path | None = option(
        None,
        "File of the nodes by your ids: .csv or .parquet with a column `id`, or .txt with an id per line. "
        "Default: all nodes.",
        metavar="FILE",
    )
    scores: bool = option(
        False,
        "Also write scores: probabilities of the classes or labels, as a column `scores`. Not for .csv.",
    )
    weights: Literal["best", "final"] = option("best", "Epoch of the weights: best by validation, or final.")
    data: str | None = path_option(
        None, "Folder of the dataset, if it has moved since the training.", metavar="DIR"
    )
    overwrite: bool = option(False, "Replace FILE.")

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.out.suffix not in (".parquet", ".csv"):
            raise ConfigError(f"--out {self.out} must end with .parquet or .csv")
        if self.scores and self.out.suffix == ".csv":
            raise ConfigError(f"--scores writes lists, which --out {self.out} cannot hold. Use .parquet.")
        if self.out.exists() and not self.overwrite:
            raise ConfigError(f"--out {self.out} exists. Choose another file, or add --overwrite.")


@command(PredictCommand)
def predict(config: PredictCommand) -> None:
    """Predict nodes with the model of a finished run, exactly, and write a table with your ids.

    Example: `dglx predict runs/demo --nodes ids.csv --out answers.parquet`

    One process reads the weights, the options and the dataset of the run. The table has the columns `id`,
    `prediction`, and `class` if the classes have names.
    """
    from dglx_dist.cli.predict_job import predict_nodes

    if is_launched_by_torchrun():
        raise ConfigError(
            "dglx predict runs in one process, but torchrun has started this one. Run it alone."
        )
    num_nodes = predict_nodes(config)
    write(f"{num_nodes} nodes written to {config.out}")

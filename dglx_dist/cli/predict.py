"""``dglx predict``."""

from __future__ import annotations

from dglx_dist.cli.common import command, write
from dglx_dist.comm.topology import is_launched_by_torchrun
from dglx_dist.errors import ConfigError
from dglx_dist.options import format_location
from dglx_dist.training.config import PredictConfig


@command(PredictConfig)
def predict(config: PredictConfig) -> None:
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
    write(f"{num_nodes} nodes written to {format_location(config.out)}")

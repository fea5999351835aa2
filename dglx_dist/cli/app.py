"""List the commands under ``dglx``, and their help."""

from typing import Annotated

import typer

import dglx_dist
from dglx_dist.cli.common import write
from dglx_dist.cli.doctor import doctor
from dglx_dist.cli.partition import ingest, partition
from dglx_dist.cli.plan import plan
from dglx_dist.cli.predict import predict
from dglx_dist.cli.report import inspect, report
from dglx_dist.cli.serverless import lambda_app
from dglx_dist.cli.train import train

app = typer.Typer(
    name="dglx",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        write(f"dglx_dist {dglx_dist.__version__}")
        raise typer.Exit


@app.callback(
    epilog="""
**From a graph to a trained model**

    dglx partition synthetic:nodes=20000,degree=25 --parts 2 --out data/demo\n
    dglx inspect data/demo\n
    dglx train data/demo --ranks 2 --epochs 5 --out runs/demo\n
    dglx report runs/demo

On several machines, torchrun starts the ranks: `torchrun --nnodes 2 --nproc-per-node 4
--rdzv-backend c10d --rdzv-endpoint HOST:29500 -m dglx_dist.cli train data/demo --out runs/demo`

Exit codes: 0 for success. 2 for an error that you can correct, with one message that says how. 75 if a
signal stopped the run after it saved a checkpoint. The same command then resumes the run. 128 + signal if a
rank was killed. 1 for everything else.
"""
)
def root(
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks. Can be given anywhere on the command line.")
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Partition a graph, train a model on it with many processes, and report the cost."""


# --patience, the former name of --early-stop, still works.
_FLAG_NAMES = {"token_normalize_func": lambda name: "early-stop" if name == "patience" else name}
for command in (partition, ingest, inspect, plan, train, predict, report):
    app.command(no_args_is_help=True, context_settings=_FLAG_NAMES if command is train else None)(command)
app.command()(doctor)
app.add_typer(lambda_app)

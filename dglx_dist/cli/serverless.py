"""``dglx lambda``: workers of strategy ``lambda`` as functions of AWS."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from dglx_dist.cli.common import command, warn, write
from dglx_dist.errors import ConfigError
from dglx_dist.memory import format_bytes
from dglx_dist.options import option, parse_pairs
from dglx_dist.strategies.serverless.aws.clients import ARCHITECTURES, Deployment, Place

lambda_app = typer.Typer(
    name="lambda",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the function.", show_default=False)]
REGION = "Region of AWS. Default: the region of the AWS command line."
ENDPOINT_URL = "URL of another service with AWS's interface."
DRY_RUN = "Print the changes, but do not make them."
Region = Annotated[str | None, typer.Option(help=REGION, show_default=False)]
EndpointUrl = Annotated[str | None, typer.Option(metavar="URL", help=ENDPOINT_URL, show_default=False)]
DryRun = Annotated[bool, typer.Option("--dry-run", help=DRY_RUN)]


@lambda_app.callback(
    epilog="""
**Workers on AWS, in four commands**

    dglx lambda package worker.zip --python 3.12\n
    dglx lambda deploy dglx-worker --package worker.zip --subnet subnet-1 --security-group sg-1 --memory 512\n
    dglx lambda invoke-test dglx-worker\n
    dglx train data/demo --strategy lambda --option executor=aws \\

        --option function=dglx-worker --option interface=eth0

Credentials come from the same places as for the AWS command line. Each command prints its changes beforehand,
and does not touch anything that it did not create. `dglx lambda remove dglx-worker` removes all of it.
"""
)
def functions() -> None:
    """Deploy workers as a function of AWS Lambda, test or remove it. Needs `pip install 'dglx_dist[aws]'`."""


@lambda_app.command()
def package(
    target: Annotated[Path, typer.Argument(metavar="FILE", help="Zip file to write.", show_default=False)],
    stage: Annotated[
        list[str] | None, typer.Option(metavar="NAME=MODULE:CLASS", help="Stage of your own. Repeatable.")
    ] = None,
    python: Annotated[
        str | None,
        typer.Option(help="Python version of numpy and pyzmq, like 3.12. Default: that of this Python."),
    ] = None,
    architecture: Annotated[
        str | None,
        typer.Option(help="Processor for --python: x86_64 or arm64. Default: x86_64.", show_default=False),
    ] = None,
) -> None:
    """Write the package of a worker: the modules of dglx_dist that it imports, numpy, pyzmq, and your own
    stages.

    Equal contents give equal files, so a function is updated only if something has changed.

    Example: `dglx lambda package worker.zip --python 3.12`
    """
    from hashlib import sha256
    from tempfile import TemporaryDirectory

    from dglx_dist.strategies.serverless.aws.deploy import what_aws_lacks
    from dglx_dist.strategies.serverless.aws.package import download_wheels, write_zip

    if architecture is not None and python is None:
        raise ConfigError(
            f"--architecture {architecture} selects the wheels that --python fetches. Add --python."
        )
    if architecture is not None and architecture not in ARCHITECTURES:
        raise ConfigError(f"--architecture {architecture} must be one of {', '.join(ARCHITECTURES)}")
    with TemporaryDirectory(prefix="dglx-wheels-") as folder:
        wheels = None
        if python is not None:
            wheels = Path(folder)
            download_wheels(wheels, python=python, architecture=ARCHITECTURES[architecture or "x86_64"])
        write_zip(target, parse_pairs(stage or [], "--stage"), wheels=wheels)
    written = target.read_bytes()
    write(f"{target}: {format_bytes(len(written))}, SHA-256 {sha256(written).hexdigest()[:16]}")
    if lacks := what_aws_lacks(target):
        warn(f"AWS cannot run it: {lacks}")


@dataclass(frozen=True, kw_only=True)
class DeployCommand(Deployment):
    """Options of ``dglx lambda deploy``."""

    region: str | None = option(None, REGION)
    endpoint_url: str | None = option(None, ENDPOINT_URL, metavar="URL")
    dry_run: bool = option(False, DRY_RUN, flag="--dry-run")


@lambda_app.command()
@command(DeployCommand)
def deploy(config: DeployCommand) -> None:
    """Create or update the function, and wait until it can be used.

    Parts that are up to date are not touched, so a repeated call continues where the last one stopped.

    Example: `dglx lambda deploy dglx-worker --package worker.zip --memory 512 --dry-run`
    """
    from dglx_dist.strategies.serverless.aws import deploy as aws

    changes = aws.Changes(write, dry_run=config.dry_run)
    aws.deploy(replace(config, place=Place(region=config.region, endpoint_url=config.endpoint_url)), changes)
    if not changes.number:
        write(f"{config.name} is up to date")


@lambda_app.command("invoke-test")
def invoke_test(
    name: Name,
    address: Annotated[
        str | None,
        typer.Option(help="Address where the function reaches this machine. Default: the one towards AWS."),
    ] = None,
    region: Region = None,
    endpoint_url: EndpointUrl = None,
) -> None:
    """Run two small tasks in the function for this machine, and check their results.

    The function connects back to this machine, so this tests network, secret and package. It costs two
    invocations.

    Example: `dglx lambda invoke-test dglx-worker --address 10.0.0.5`
    """
    from dglx_dist.strategies.serverless.aws.deploy import try_function

    place = Place(region=region, endpoint_url=endpoint_url)
    for seconds, answer in try_function(name, place, write, address=address):
        kind = "cold" if answer.cold else "warm"
        write(f"{kind}: correct after {seconds:.3f} s, including {answer.seconds:.3f} s in the worker")


@lambda_app.command()
def remove(
    name: Name, region: Region = None, endpoint_url: EndpointUrl = None, dry_run: DryRun = False
) -> None:
    """Delete the function, its log, and the role that was created for it.

    Example: `dglx lambda remove dglx-worker --dry-run`
    """
    from dglx_dist.strategies.serverless.aws import deploy as aws

    changes = aws.Changes(write, dry_run=dry_run)
    aws.remove(name, Place(region=region, endpoint_url=endpoint_url), changes)
    if not changes.number:
        write(f"nothing is left of {name}")


@lambda_app.command()
def prices(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="Price table: aws, dorylus (from the paper), or the path of a JSON file."
        ),
    ] = "aws",
) -> None:
    """Print a price table as JSON. Edit a copy and pass it with `--option prices=FILE`.

    Example: `dglx lambda prices > mine.json`
    """
    from dglx_dist.strategies.serverless import cost as tables

    typer.echo(tables.prices(name).to_json(), nl=False)

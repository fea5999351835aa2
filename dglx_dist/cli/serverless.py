"""``dglx lambda``: run strategy ``lambda`` with workers in AWS functions."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from dglx_dist.cli.common import command, write
from dglx_dist.options import option
from dglx_dist.strategies.serverless.aws.clients import Deployment, Place

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
**Workers on AWS**, where REGISTRY is a repository of your account in Amazon ECR

    dglx lambda image worker && docker build -t REGISTRY/dglx-worker:1 worker\n
    docker push REGISTRY/dglx-worker:1\n
    dglx lambda deploy dglx-worker --image REGISTRY/dglx-worker:1 --subnet subnet-1 --security-group sg-1\n
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
def image(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder to write.", show_default=False)],
    python: Annotated[str, typer.Option(help="Version of Python in the image.")] = "3.12",
) -> None:
    """Write the build context of a worker's image: a Dockerfile with torch for CPUs, and this package.

    Example: `dglx lambda image worker && docker build -t dglx-worker worker`
    """
    from dglx_dist.strategies.serverless.aws.deploy import write_context

    write_context(folder, python)
    write(f"{folder}: build it with `docker build -t dglx-worker {folder}`, and push it to a registry of AWS")


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

    Example: `dglx lambda deploy dglx-worker --image REGISTRY/dglx-worker:1 --dry-run`
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

    The function connects back to this machine, so this tests network, secret and image. It costs two
    invocations.

    Example: `dglx lambda invoke-test dglx-worker --address 10.0.0.5`
    """
    from dglx_dist.strategies.serverless.aws.deploy import try_function

    place = Place(region=region, endpoint_url=endpoint_url)
    for seconds, answer in try_function(name, place, write, address=address):
        start = "cold" if answer.cold else "warm"
        write(f"{start}: correct after {seconds:.3f} s, including {answer.seconds:.3f} s in the worker")


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

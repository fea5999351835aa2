"""`dglx lambda` as a user types it, against a functions service on this machine."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from dglx_dist.cli.app import app
from dglx_dist.errors import ConfigError

from ..helpers.functions_service import REGION, FunctionsService

ROLE = "arn:aws:iam::123456789012:role/mine"


def functions(*arguments: str) -> Result:
    keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": REGION}
    return CliRunner().invoke(app, ["lambda", *arguments], env={"COLUMNS": "150", **keys})


def test_deploy_try_and_remove(worker_package: Path) -> None:
    with FunctionsService() as service:
        where = ("--endpoint-url", service.url)
        inputs = f"--image {service.push(worker_package)} --role {ROLE} --memory 256".split()
        command = ("deploy", "ours", *inputs, *where)
        planned = functions(*command, "--dry-run")
        assert planned.exit_code == 0, planned.output
        assert "would create the function ours: memory 256 MB" in planned.output
        assert service.functions == {}
        made = functions(*command)
        assert made.exit_code == 0, made.output
        assert "create the function ours" in made.output
        assert functions(*command).output == "ours is up to date\n"
        tried = functions("invoke-test", "ours", *where)
        assert tried.exit_code == 0, tried.output
        assert [line.split(":")[0] for line in tried.output.splitlines()[1:]] == ["cold", "warm"]
        assert "correct after" in tried.output
        gone = functions("remove", "ours", *where)
        assert gone.output == "delete the function ours\ndelete the log /aws/lambda/ours\n"
        assert service.functions == {}
        assert functions("remove", "ours", *where, "--dry-run").output == "nothing is left of ours\n"


def test_the_image_has_torch_and_this_package(tmp_path: Path) -> None:
    target = tmp_path / "worker"
    assert functions("image", str(target)).output.startswith(f"{target}: build it with `docker build")
    text = (target / "Dockerfile").read_text()
    assert f"torch=={torch.__version__.partition('+')[0]} --index-url" in text
    assert (target / "dglx_dist" / "strategies" / "serverless" / "aws" / "function.py").is_file()
    assert not list(target.rglob("__pycache__"))
    refused = functions("image", str(target)).exception
    assert isinstance(refused, ConfigError)
    assert "is not empty" in str(refused)


def test_prices_can_be_changed_and_given_back(tmp_path: Path) -> None:
    table = json.loads(functions("prices").output)
    assert table["per_gb_second"] == pytest.approx(1.66667e-5)
    own = tmp_path / "mine.json"
    own.write_text(json.dumps({**table, "name": "mine", "per_request": 0}))
    assert json.loads(functions("prices", str(own)).output)["name"] == "mine"
    assert isinstance(functions("prices", "nowhere").exception, ConfigError)

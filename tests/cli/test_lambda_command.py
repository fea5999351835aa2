"""`dglx lambda` as a user types it, against a functions service on this machine."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from dglx_dist.cli.app import app
from dglx_dist.errors import ConfigError
from dglx_dist.strategies.serverless.aws import package

from ..helpers.functions_service import REGION, FunctionsService

ROLE = "arn:aws:iam::123456789012:role/mine"


def functions(*arguments: str) -> Result:
    keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": REGION}
    return CliRunner().invoke(app, ["lambda", *arguments], env={"COLUMNS": "150", **keys})


def test_deploy_try_and_remove(worker_package: Path) -> None:
    with FunctionsService() as service:
        where = ("--endpoint-url", service.url)
        inputs = f"--package {worker_package} --role {ROLE} --memory 256".split()
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


def test_package_writes_the_same_file_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package, "LIBRARIES", {})  # 15 MB, which test_package.py packs
    target = tmp_path / "worker.zip"
    message = [functions("package", str(target)).output for _ in range(2)]
    assert message[0] == message[1]
    assert str(target) in message[0]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (("--architecture", "arm64"), "Add --python"),
        (("--architecture", "sparc", "--python", "3.12"), "x86_64, arm64"),
    ],
)
def test_what_would_have_no_effect_is_refused(given: tuple[str, ...], told: str, tmp_path: Path) -> None:
    refused = functions("package", str(tmp_path / "worker.zip"), *given).exception
    assert isinstance(refused, ConfigError)
    assert told in str(refused)


def test_prices_can_be_changed_and_given_back(tmp_path: Path) -> None:
    table = json.loads(functions("prices").output)
    assert table["per_gb_second"] == pytest.approx(1.66667e-5)
    own = tmp_path / "mine.json"
    own.write_text(json.dumps({**table, "name": "mine", "per_request": 0}))
    assert json.loads(functions("prices", str(own)).output)["name"] == "mine"
    assert isinstance(functions("prices", "nowhere").exception, ConfigError)

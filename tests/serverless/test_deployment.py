"""What a deployment may say, and which runtime its package fits; nobody is asked."""

from __future__ import annotations

import ast
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import dglx_dist
from dglx_dist.errors import ConfigError
from dglx_dist.serverless.aws.clients import Deployment, Place
from dglx_dist.serverless.aws.deploy import compiled_of, runtime_for, what_aws_lacks

from ..helpers.zips import zipped


@pytest.fixture
def wanted(tmp_path: Path) -> Deployment:
    return Deployment(name="dglx-worker", package=zipped(tmp_path), runtime="python3.12")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"name": "my worker"}, "not a valid function name"),
        ({"memory_mb": 64}, "128 to 10240"),
        ({"timeout_s": 901}, "1 to 900"),
        ({"subnets": ("subnet-1",)}, "needs both"),
        ({"architecture": "sparc"}, "x86_64, arm64"),
        ({"runtime": "nodejs18.x"}, "python3.12"),
        ({"package": Path("absent.zip")}, "dglx lambda package"),
    ],
)
def test_settings_that_aws_does_not_take_are_refused(
    change: dict[str, Any], told: str, wanted: Deployment
) -> None:
    with pytest.raises(ConfigError, match=told):
        replace(wanted, **change)


def test_a_package_must_fit_its_runtime(wanted: Deployment, tmp_path: Path) -> None:
    """NumPy 2 needs glibc 2.27, and AWS's Python 3.11 stands on Amazon Linux 2 with 2.26."""
    assert runtime_for(wanted, on_aws=True) == "python3.12"
    old = zipped(tmp_path, "\0GLIBC_2.5\0GLIBC_2.27\0", name="numpy/x.cpython-311-x86_64-linux-gnu.so")
    assert (compiled_of(old).python, compiled_of(old).architecture, compiled_of(old).glibc) == (
        11,
        "x86_64",
        27,
    )
    with pytest.raises(ConfigError, match=r"made for Python 3.11 and the runtime is python3.12"):
        runtime_for(wanted, on_aws=True)
    with pytest.raises(ConfigError, match=r"needs glibc 2.27 .* has 2.26; .*--python 3.12"):
        runtime_for(replace(wanted, runtime=None), on_aws=True)
    assert runtime_for(replace(wanted, runtime=None), on_aws=False) == "python3.11"
    new = zipped(tmp_path, "\0GLIBC_2.27\0", name="numpy/x.cpython-312-aarch64-linux-gnu.so")
    assert what_aws_lacks(new) == ""
    with pytest.raises(ConfigError, match="made for arm64"):
        runtime_for(wanted, on_aws=True)
    assert runtime_for(replace(wanted, architecture="arm64", runtime=None), on_aws=True) == "python3.12"
    old.write_text("no zip")
    with pytest.raises(ConfigError, match="is not a package"):
        runtime_for(wanted, on_aws=True)


def test_boto3_is_asked_for_when_it_is_needed_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("boto3", "botocore", "botocore.config"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"pip install 'dglx_dist\[aws\]'"):
        Place(region="eu-west-1").client("lambda")
    for file in Path(dglx_dist.__file__).parent.rglob("*.py"):
        text = file.read_text()
        for node in ast.parse(text).body if "boto" in text else ():
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [one.name for one in node.names] if isinstance(node, ast.Import) else []
            assert not any(name.startswith(("boto3", "botocore")) for name in names), file

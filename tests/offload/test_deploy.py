"""Functions are made, brought up to date and removed on AWS (moto's): what is said before, and done once."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto import mock_aws

from dglx_dist.errors import ConfigError
from dglx_dist.offload.aws import role
from dglx_dist.offload.aws.clients import Place
from dglx_dist.offload.aws.deployment import HANDLER, Deployment
from dglx_dist.offload.aws.function import Function
from dglx_dist.offload.aws.runtime import compiled_of, runtime_for, what_aws_lacks
from dglx_dist.offload.deploy import deploy, plan, plan_removal, remove

NAME, REGION = "dglx-worker", "eu-west-1"


@pytest.fixture(autouse=True)
def aws(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    with mock_aws():
        # Reading all of AWS's own policies takes moto a second for each test; two of the same names do.
        iam = client("iam")
        statement = {"Effect": "Allow", "Action": "logs:PutLogEvents", "Resource": "*"}
        document = json.dumps({"Version": "2012-10-17", "Statement": [statement]})
        for name in ("LOG_POLICY", "VPC_POLICY"):
            short = getattr(role, name).rpartition("/")[2]
            made = iam.create_policy(PolicyName=short, Path="/service-role/", PolicyDocument=document)
            monkeypatch.setattr(role, name, made["Policy"]["Arn"])
        monkeypatch.setattr(role, "_MANAGED", made["Policy"]["Arn"].rpartition("/")[0] + "/")
        yield


def zipped(folder: Path, text: str = "first", *, name: str = "code.py") -> Path:
    path = folder / "worker.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(name, text)
    return path


@pytest.fixture
def wanted(tmp_path: Path) -> Deployment:
    return Deployment(name=NAME, package=zipped(tmp_path), place=Place(region=REGION), runtime="python3.12")


def client(service: str) -> Any:
    return boto3.client(service, region_name=REGION)


def do(deployment: Deployment) -> list[str]:
    """Deploy; what was planned, said and done must be the same."""
    planned, said = plan(deployment), list[str]()
    assert deploy(deployment, said.append) == tuple(said) == planned
    return said


def settings() -> dict[str, Any]:
    return dict(client("lambda").get_function(FunctionName=NAME)["Configuration"])


def in_vpc(deployment: Deployment) -> Deployment:
    ec2 = client("ec2")
    vpc = ec2.create_vpc(CidrBlock="10.0.0.0/16")["Vpc"]["VpcId"]
    blocks = ("10.0.1.0/24", "10.0.2.0/24")
    made = [ec2.create_subnet(VpcId=vpc, CidrBlock=one)["Subnet"]["SubnetId"] for one in blocks]
    group = ec2.create_security_group(GroupName="ours", Description="ours", VpcId=vpc)["GroupId"]
    return replace(deployment, subnets=tuple(sorted(made, reverse=True)), security_groups=(group,))


def test_a_function_is_made_with_its_role_and_the_second_time_nothing_is_done(wanted: Deployment) -> None:
    plan(wanted)
    assert client("lambda").list_functions()["Functions"] == []
    assert client("iam").list_roles()["Roles"] == []
    said = do(wanted)
    assert said[0] == "create the role dglx-worker-role"
    assert said[1] == "let the role dglx-worker-role use AWSLambdaBasicExecutionRole"
    assert said[2].startswith(
        "create the function dglx-worker: memory 192 MB, time-out 60 s, runtime python3.12"
    )
    found = settings()
    assert (found["Handler"], found["MemorySize"], found["Timeout"]) == (HANDLER, 192, 60)
    assert found["Role"].endswith(":role/dglx-worker-role")
    events = client("lambda").get_function_event_invoke_config(FunctionName=NAME)
    assert events["MaximumRetryAttempts"] == 0
    (policy,) = client("iam").list_attached_role_policies(RoleName="dglx-worker-role")["AttachedPolicies"]
    assert policy["PolicyArn"] == role.LOG_POLICY
    assert do(wanted) == []


def test_only_what_differs_is_updated(wanted: Deployment, tmp_path: Path) -> None:
    do(wanted)
    first = settings()["CodeSha256"]
    said = do(replace(wanted, memory_mb=512, timeout_s=30))
    assert said == ["update MemorySize, Timeout of dglx-worker", "wait until dglx-worker is updated"]
    assert (settings()["MemorySize"], settings()["Timeout"], settings()["CodeSha256"]) == (512, 30, first)
    zipped(tmp_path, "second")
    said = do(replace(wanted, memory_mb=512, timeout_s=30))
    assert [text.split(" (")[0] for text in said] == [
        "update the code of dglx-worker",
        "wait until dglx-worker is updated",
    ]
    assert settings()["CodeSha256"] != first


def test_a_function_in_a_vpc_may_have_network_cards_there(wanted: Deployment) -> None:
    inside = in_vpc(wanted)
    do(inside)
    assert set(settings()["VpcConfig"]["SubnetIds"]) == set(inside.subnets)
    assert settings()["VpcConfig"]["SecurityGroupIds"] == list(inside.security_groups)
    (policy,) = client("iam").list_attached_role_policies(RoleName="dglx-worker-role")["AttachedPolicies"]
    assert policy["PolicyArn"] == role.VPC_POLICY
    assert do(replace(inside, subnets=inside.subnets[::-1])) == []
    assert do(wanted)[0] == "let the role dglx-worker-role use AWSLambdaBasicExecutionRole"


def test_it_goes_on_where_it_stopped(wanted: Deployment) -> None:
    said: list[str] = []

    def stop_at_function(text: str) -> None:
        said.append(text)
        if text.startswith("create the function"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        deploy(wanted, stop_at_function)
    assert len(said) == 3
    assert do(wanted)[0].startswith("create the function")


def test_a_given_role_is_used_and_never_touched(wanted: Deployment) -> None:
    trust = '{"Version": "2012-10-17", "Statement": []}'
    arn = client("iam").create_role(RoleName="mine", AssumeRolePolicyDocument=trust)["Role"]["Arn"]
    assert "role" not in " ".join(do(replace(wanted, role="mine")))
    assert settings()["Role"] == arn
    assert do(replace(wanted, role=arn)) == []
    with pytest.raises(ConfigError, match="there is no role 'yours'"):
        plan(replace(wanted, role="yours"))
    remove(NAME, wanted.place, lambda _: None)
    assert [one["RoleName"] for one in client("iam").list_roles()["Roles"]] == ["mine"]


def test_a_large_package_goes_by_a_bucket(wanted: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    from dglx_dist.offload.aws import deployment as bounds
    from dglx_dist.offload.aws import function as function_module

    monkeypatch.setattr(bounds, "MAX_DIRECT_BYTES", 10)
    monkeypatch.setattr(function_module, "MAX_DIRECT_BYTES", 10)
    with pytest.raises(ConfigError, match="--bucket"):
        replace(wanted)
    storage = client("s3")
    storage.create_bucket(Bucket="ours", CreateBucketConfiguration={"LocationConstraint": REGION})
    large = replace(wanted, bucket="ours")
    assert any(text.startswith("upload the package to s3://ours/dglx/dglx-worker-") for text in do(large))
    (stored,) = storage.list_objects_v2(Bucket="ours")["Contents"]
    assert stored["Size"] == wanted.package.stat().st_size
    assert do(large) == []


def test_everything_that_was_made_is_removed_and_nothing_else(wanted: Deployment) -> None:
    do(wanted)
    client("logs").create_log_group(logGroupName=f"/aws/lambda/{NAME}")
    client("logs").create_log_group(logGroupName=f"/aws/lambda/{NAME}-2")
    planned, said = plan_removal(NAME, wanted.place), list[str]()
    assert remove(NAME, wanted.place, said.append) == planned == tuple(said)
    assert planned == (
        "delete the function dglx-worker",
        "delete the log /aws/lambda/dglx-worker",
        "delete the role dglx-worker-role",
    )
    assert client("lambda").list_functions()["Functions"] == []
    assert client("iam").list_roles()["Roles"] == []
    assert [one["logGroupName"] for one in client("logs").describe_log_groups()["logGroups"]] == [
        f"/aws/lambda/{NAME}-2"
    ]
    assert remove(NAME, wanted.place, said.append) == ()


def test_what_others_made_is_left_alone(wanted: Deployment) -> None:
    trust = '{"Version": "2012-10-17", "Statement": []}'
    iam = client("iam")
    iam.create_role(RoleName="dglx-worker-role", AssumeRolePolicyDocument=trust)
    with pytest.raises(ConfigError, match="not made for the function dglx-worker"):
        plan(wanted)
    arn = iam.get_role(RoleName="dglx-worker-role")["Role"]["Arn"]
    code = {"ZipFile": wanted.package.read_bytes()}
    client("lambda").create_function(
        FunctionName=NAME, Runtime="python3.12", Role=arn, Handler="a.b", Code=code
    )
    for attempt in (lambda: plan(replace(wanted, role=arn)), lambda: plan_removal(NAME, wanted.place)):
        with pytest.raises(ConfigError, match="was not made by dglx"):
            attempt()


def test_a_role_that_is_not_known_yet_is_waited_for(
    wanted: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    made = Function(wanted, pauses.append)
    refused = made._client.exceptions.InvalidParameterValueException(
        {"Error": {"Message": "The role defined for the function cannot be assumed by Lambda."}},
        "CreateFunction",
    )
    create, left = made._client.create_function, [refused, refused]

    def sometimes(**given: Any) -> Any:
        if left:
            raise left.pop()
        return create(**given)

    monkeypatch.setattr(made._client, "create_function", sometimes)
    for step in made.steps():
        step.act()
    assert len(pauses) == 2
    assert settings()["FunctionName"] == NAME


def test_a_function_that_cannot_be_used_is_told(wanted: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Function(wanted, lambda _: None)
    *_, wait, _drop = made.steps()
    states = [{"State": "Pending"}, {"State": "Failed", "StateReason": "no addresses left in subnet-1"}]
    monkeypatch.setattr(made._client, "get_function_configuration", lambda FunctionName: states.pop(0))
    with pytest.raises(ConfigError, match="no addresses left in subnet-1"):
        wait.act()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"name": "my worker"}, "no function can be called"),
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
    assert runtime_for(wanted) == "python3.12"
    old = zipped(tmp_path, "\0GLIBC_2.5\0GLIBC_2.27\0", name="numpy/x.cpython-311-x86_64-linux-gnu.so")
    assert (compiled_of(old).python, compiled_of(old).architecture, compiled_of(old).glibc) == (
        11,
        "x86_64",
        27,
    )
    with pytest.raises(ConfigError, match=r"made for Python 3.11 and the runtime is python3.12"):
        runtime_for(wanted)
    with pytest.raises(ConfigError, match=r"needs glibc 2.27 .* has 2.26; .*--python 3.12"):
        runtime_for(replace(wanted, runtime=None))
    assert runtime_for(replace(wanted, runtime=None, place=Place(endpoint_url="http://here"))) == "python3.11"
    new = zipped(tmp_path, "\0GLIBC_2.27\0", name="numpy/x.cpython-312-aarch64-linux-gnu.so")
    assert what_aws_lacks(new) == ""
    with pytest.raises(ConfigError, match="made for arm64"):
        runtime_for(wanted)
    assert runtime_for(replace(wanted, architecture="arm64", runtime=None)) == "python3.12"
    old.write_text("no zip")
    with pytest.raises(ConfigError, match="is no package"):
        runtime_for(wanted)

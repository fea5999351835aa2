"""Functions are created, updated and removed on AWS (moto's), and each step is named first."""

from __future__ import annotations

import ast
import functools
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from moto import mock_aws

import dglx_dist
from dglx_dist.errors import ConfigError
from dglx_dist.strategies.serverless.aws import deploy as made
from dglx_dist.strategies.serverless.aws.clients import Deployment, Place
from dglx_dist.strategies.serverless.aws.deploy import Changes

NAME, REGION = "dglx-worker", "eu-west-1"
REGISTRY = "123456789012.dkr.ecr.eu-west-1.amazonaws.com"
IMAGE, SECOND = f"{REGISTRY}/dglx-worker:1", f"{REGISTRY}/dglx-worker:2"
PLACE = Place(region=REGION)
"""One for all tests: each new one reads boto3's descriptions of the services again."""


@pytest.fixture(scope="module")
def mock_service() -> Iterator[Any]:
    with mock_aws() as running:
        yield running


@pytest.fixture(autouse=True)
def aws(mock_service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is there but the two policies that are used: reading all of AWS's own takes moto a second."""
    mock_service.reset()
    statement = {"Effect": "Allow", "Action": "logs:PutLogEvents", "Resource": "*"}
    document = json.dumps({"Version": "2012-10-17", "Statement": [statement]})
    for name in ("LOG_POLICY", "VPC_POLICY"):
        short = getattr(made, name).rpartition("/")[2]
        new = client("iam").create_policy(PolicyName=short, Path="/service-role/", PolicyDocument=document)
        monkeypatch.setattr(made, name, new["Policy"]["Arn"])
    monkeypatch.setattr(made, "_MANAGED_POLICIES", new["Policy"]["Arn"].rpartition("/")[0] + "/")


@pytest.fixture
def deployment(monkeypatch: pytest.MonkeyPatch) -> Deployment:
    # moto then does not look for images in a registry.
    monkeypatch.setenv("MOTO_LAMBDA_STUB_ECR", "true")
    return Deployment(name=NAME, image=IMAGE, place=PLACE)


@functools.cache
def client(service: str) -> Any:
    return PLACE.client(service)


def do(deployment: Deployment, *, dry_run: bool = False) -> list[str]:
    messages: list[str] = []
    made.deploy(deployment, Changes(messages.append, dry_run=dry_run))
    return [text.removeprefix("would ") for text in messages]


def remove(*, dry_run: bool = False) -> list[str]:
    messages: list[str] = []
    made.remove(NAME, PLACE, Changes(messages.append, dry_run=dry_run))
    return [text.removeprefix("would ") for text in messages]


plan, plan_removal = functools.partial(do, dry_run=True), functools.partial(remove, dry_run=True)


def settings() -> dict[str, Any]:
    return dict(client("lambda").get_function(FunctionName=NAME)["Configuration"])


def test_a_function_is_made_with_its_role_and_the_second_time_nothing_is_done(deployment: Deployment) -> None:
    plan(deployment)
    assert client("lambda").list_functions()["Functions"] == []
    assert client("iam").list_roles()["Roles"] == []
    message = do(deployment)
    assert message[0] == "create the role dglx-worker-role"
    assert message[1] == "let the role dglx-worker-role use AWSLambdaBasicExecutionRole"
    assert message[2].startswith(
        f"create the function dglx-worker: memory 1024 MB, time-out 60 s, image {IMAGE}"
    )
    record = settings()
    assert (record["PackageType"], record["MemorySize"], record["Timeout"]) == ("Image", 1024, 60)
    assert record["Role"].endswith(":role/dglx-worker-role")
    events = client("lambda").get_function_event_invoke_config(FunctionName=NAME)
    assert events["MaximumRetryAttempts"] == 0
    (policy,) = client("iam").list_attached_role_policies(RoleName="dglx-worker-role")["AttachedPolicies"]
    assert policy["PolicyArn"] == made.LOG_POLICY
    assert do(deployment) == []


def test_only_differing_settings_are_updated(deployment: Deployment) -> None:
    do(deployment)
    message = do(replace(deployment, memory_mb=512, timeout_s=30))
    assert message == ["update MemorySize, Timeout of dglx-worker", "wait until dglx-worker is updated"]
    assert (settings()["MemorySize"], settings()["Timeout"]) == (512, 30)
    message = plan(replace(deployment, memory_mb=512, timeout_s=30, image=SECOND))
    assert message == [f"update the image of dglx-worker to {SECOND}", "wait until dglx-worker is updated"]
    # The processor is a part of the image.
    message = plan(replace(deployment, memory_mb=512, timeout_s=30, architecture="arm64"))
    assert message[0] == f"update the image of dglx-worker to {IMAGE}"


def test_a_function_in_a_vpc_may_have_network_cards_there(deployment: Deployment) -> None:
    inside = replace(deployment, subnets=("subnet-2", "subnet-1"), security_groups=("sg-1",))
    do(inside)
    assert set(settings()["VpcConfig"]["SubnetIds"]) == set(inside.subnets)
    assert settings()["VpcConfig"]["SecurityGroupIds"] == list(inside.security_groups)
    (policy,) = client("iam").list_attached_role_policies(RoleName="dglx-worker-role")["AttachedPolicies"]
    assert policy["PolicyArn"] == made.VPC_POLICY
    assert do(replace(inside, subnets=inside.subnets[::-1])) == []
    assert do(deployment)[0] == "let the role dglx-worker-role use AWSLambdaBasicExecutionRole"


def test_deploy_resumes_where_it_stopped(deployment: Deployment) -> None:
    messages: list[str] = []

    def stop_at_function(text: str) -> None:
        messages.append(text)
        if text.startswith("create the function"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        made.deploy(deployment, Changes(stop_at_function))
    assert len(messages) == 3
    assert do(deployment)[0].startswith("create the function")


def test_a_given_role_is_used_and_never_touched(deployment: Deployment) -> None:
    trust = '{"Version": "2012-10-17", "Statement": []}'
    arn = client("iam").create_role(RoleName="mine", AssumeRolePolicyDocument=trust)["Role"]["Arn"]
    assert "role" not in " ".join(do(replace(deployment, role="mine")))
    assert settings()["Role"] == arn
    assert do(replace(deployment, role=arn)) == []
    with pytest.raises(ConfigError, match="there is no role 'yours'"):
        plan(replace(deployment, role="yours"))
    remove()
    assert [list_role["RoleName"] for list_role in client("iam").list_roles()["Roles"]] == ["mine"]


def test_everything_that_was_made_is_removed_and_nothing_else(deployment: Deployment) -> None:
    do(deployment)
    client("logs").create_log_group(logGroupName=f"/aws/lambda/{NAME}")
    client("logs").create_log_group(logGroupName=f"/aws/lambda/{NAME}-2")
    made_before = [
        f"delete the {label}"
        for label in (f"function {NAME}", f"log /aws/lambda/{NAME}", f"role {NAME}-role")
    ]
    assert plan_removal() == remove() == made_before
    assert client("lambda").list_functions()["Functions"] == []
    assert client("iam").list_roles()["Roles"] == []
    assert [
        describe_log_group["logGroupName"]
        for describe_log_group in client("logs").describe_log_groups()["logGroups"]
    ] == [f"/aws/lambda/{NAME}-2"]
    assert remove() == []


def test_resources_of_others_are_left_alone(deployment: Deployment) -> None:
    trust = '{"Version": "2012-10-17", "Statement": []}'
    iam = client("iam")
    iam.create_role(RoleName="dglx-worker-role", AssumeRolePolicyDocument=trust)
    with pytest.raises(ConfigError, match="not made for the function dglx-worker"):
        plan(deployment)
    arn = iam.get_role(RoleName="dglx-worker-role")["Role"]["Arn"]
    client("lambda").create_function(
        FunctionName=NAME, PackageType="Image", Role=arn, Code={"ImageUri": IMAGE}
    )
    for attempt in (lambda: plan(replace(deployment, role=arn)), plan_removal):
        with pytest.raises(ConfigError, match="was not made by dglx"):
            attempt()


def test_a_log_whose_function_is_not_ours_stays(deployment: Deployment) -> None:
    client("logs").create_log_group(logGroupName=f"/aws/lambda/{NAME}")
    assert plan_removal() == []
    # The role says that the function was ours, and that an earlier removal did not come to its end.
    do(deployment)
    client("lambda").delete_function(FunctionName=NAME)
    assert plan_removal() == ["delete the log /aws/lambda/dglx-worker", "delete the role dglx-worker-role"]


def test_a_function_that_aws_is_still_at_work_on_is_waited_for(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first deploy may have been ended before it was usable: then AWS takes no change either."""
    do(deployment)
    now = made._own_function(client("lambda"), NAME)
    assert now is not None
    for waits, state in (("active", {"State": "Pending"}), ("updated", {"LastUpdateStatus": "InProgress"})):
        there = {**now, "Configuration": {**now["Configuration"], **state}}
        monkeypatch.setattr(made, "_own_function", lambda _client, _name, there=there: there)
        assert plan(deployment) == [f"wait until dglx-worker is {waits}"]
        assert plan(replace(deployment, memory_mb=512))[0] == f"wait until dglx-worker is {waits}"


def test_a_role_that_is_not_known_yet_is_waited_for(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses, ours = list[float](), client("lambda")
    monkeypatch.setattr(made.time, "sleep", pauses.append)
    monkeypatch.setattr(Place, "client", lambda _place, service: client(service))
    refused = ours.exceptions.InvalidParameterValueException(
        {"Error": {"Message": "The role defined for the function cannot be assumed by Lambda."}},
        "CreateFunction",
    )
    create, left = ours.create_function, [refused, refused]

    def sometimes(**given: Any) -> Any:
        if left:
            raise left.pop()
        return create(**given)

    monkeypatch.setattr(ours, "create_function", sometimes)
    do(deployment)
    assert len(pauses) == 2
    assert settings()["FunctionName"] == NAME


def test_function_that_cannot_be_used_is_an_error(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)
    monkeypatch.setattr(Place, "client", lambda _place, service: client(service))
    states = [{"State": "Pending"}, {"State": "Failed", "StateReason": "no addresses left in subnet-1"}]
    answers = ({"Configuration": state} for state in states)
    waiter = client("lambda").get_waiter("function_active_v2")
    monkeypatch.setattr(waiter, "_operation_method", lambda FunctionName: next(answers))
    monkeypatch.setattr(client("lambda"), "get_waiter", lambda _name: waiter)
    with pytest.raises(ConfigError, match="no addresses left in subnet-1"):
        do(deployment)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"name": "my worker"}, "not a valid function name"),
        ({"memory_mb": 64}, "128 to 10240"),
        ({"timeout_s": 901}, "1 to 900"),
        ({"subnets": ("subnet-1",)}, "needs both"),
        ({"architecture": "sparc"}, "x86_64, arm64"),
        ({"image": "dglx-worker"}, "is no image; build one with `dglx lambda image`"),
    ],
)
def test_settings_that_aws_does_not_take_are_refused(
    change: dict[str, Any], told: str, deployment: Deployment
) -> None:
    with pytest.raises(ConfigError, match=told):
        replace(deployment, **change)


def test_boto3_is_asked_for_when_it_is_needed_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("boto3", "botocore", "botocore.config"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"pip install 'dglx_dist\[aws\]'"):
        Place(region="eu-west-1").client("lambda")
    for file in Path(dglx_dist.__file__).parent.rglob("*.py"):
        text = file.read_text()
        for node in ast.parse(text).body if "boto" in text else ():
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [item.name for item in node.names] if isinstance(node, ast.Import) else []
            assert not any(name.startswith(("boto3", "botocore")) for name in names), file

"""Workers under AWS's own runtime client, invoked by boto3: results, cold and warm, limits, deaths, bills."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dglx_dist.cli.train_job import train_dataset
from dglx_dist.errors import ConfigError, PeerError, RemoteError
from dglx_dist.strategies.serverless.aws import clients
from dglx_dist.strategies.serverless.aws.clients import Place, is_amazon
from dglx_dist.strategies.serverless.aws.deploy import try_function
from dglx_dist.strategies.serverless.aws.executor import AwsExecutor, read_report
from dglx_dist.strategies.serverless.executors.base import EXECUTORS, ExecutorContext, Invocation, Lost
from dglx_dist.training.config import TrainConfig
from tests.helpers.functions_service import REGION, Function, FunctionsService
from tests.helpers.images import write_image
from tests.strategies import equality

from .programs import gcn
from .servers import Bench, keys_of, serve, until

NAME = "dglx-worker"


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials, where boto3's own chain finds them."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", REGION)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.fixture(scope="module")
def service(worker_package: Path) -> Iterator[FunctionsService]:
    """One service with one function for all tests: its first container takes the longest."""
    with FunctionsService() as running:
        running.add(NAME, worker_package)
        yield running


def executor(service: FunctionsService, **options: object) -> AwsExecutor:
    inputs = {"function": NAME, "endpoint_url": service.url, "read_log_every_s": 0.05}
    return AwsExecutor(ExecutorContext(), {**inputs, **options})


def function(service: FunctionsService) -> Function:
    result = service.functions[NAME]
    result.outcomes.clear()
    result.lines.clear()
    return result


def test_tasks_come_back_with_their_bill(service: FunctionsService) -> None:
    bench, ours = Bench(gcn(), [7, 4, 3]), function(service)
    ours.concurrency = 2
    keys = [key for interval in range(3) for key in keys_of(bench.program, interval)]
    with serve(bench), executor(service) as running:
        running.size(4)
        for key in keys:
            running.invoke(bench.task(key))
        assert bench.wait_for(running, keys) == []
        billed = list[Invocation]()
        until(lambda: billed.extend(running.take_billed()) or len(billed) == len(keys), "billed")
    for key in keys:
        bench.check(key)
    assert len(ours.containers) <= 2
    assert 1 <= sum(item.cold for item in billed) <= 2
    assert {item.memory_mb for item in billed} == {192}
    seconds = [sum(item.duration_s for item in some) for some in (billed, ours.outcomes)]
    assert seconds[0] == pytest.approx(seconds[1], abs=0.002 * len(keys))
    assert running.simulated


@pytest.mark.wide
def test_run_on_functions_equals_a_run_without_bit_for_bit(
    service: FunctionsService, tmp_path_factory: pytest.TempPathFactory
) -> None:
    function(service)
    folder = tmp_path_factory.mktemp("run")
    plan = TrainConfig(data=str(equality.write_parts(folder)), out="", hidden=8, dropout=0.0, epochs=2)
    here = {"executor": "inline", "intervals": 2, "workers": 2}
    there = {"executor": "aws", "function": NAME, "endpoint_url": service.url, "read_log_every_s": 0.05}
    losses = []
    for number, options in enumerate((here, {**here, **there})):
        out = folder / str(number)
        train_dataset(replace(plan, out=str(out), strategy="lambda", strategy_options=options))
        epochs = (out / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(epoch)["loss"] for epoch in epochs])
    account = json.loads((out / "summary.json").read_text())["account"]
    assert losses[0] == losses[1]
    assert len(losses[1]) == 2
    assert account["invocations"] >= 2 * 2 * 3
    assert account["label"].startswith("simulated")


def test_task_of_a_dead_container_runs_in_another(service: FunctionsService) -> None:
    """AWS tells nothing: only the time says that it is dead. The late result of a slow one is refused."""
    bench, ours = Bench(gcn(), [7]), function(service)
    ours.retries = 0
    (key, *_) = keys_of(bench.program)
    # The first pull is told "not yet" for long: time enough to kill who waits.
    bench.late = 10**6
    with serve(bench), executor(service, read_log=False) as running:
        running.invoke(bench.task(key))
        until(lambda: ("pull", f"{key}/0") in bench.calls, "asked for rows")
        assert service.kill_busy(NAME) == 1
        (outcome,) = service.wait_for(NAME, 1)
        assert outcome.error == "Sandbox.Exit"
        assert running.take_lost() == []
        bench.late = 0
        running.invoke(bench.task(key).again())
        bench.wait_for(running, [key])
    bench.check(key)


def test_the_trial_shows_why_a_function_fails(service: FunctionsService, tmp_path: Path) -> None:
    service.add(
        "other",
        write_image(tmp_path, "def handler(event, context): raise OSError('no memory')\n"),
    )
    with pytest.raises(RemoteError, match="no memory"):
        try_function("other", Place(endpoint_url=service.url), lambda _: None)
    with pytest.raises(ConfigError, match=r"cannot listen at '192.0.2.1'"):
        try_function("other", Place(endpoint_url=service.url), lambda _: None, address="192.0.2.1")


def test_mistakes_are_named(service: FunctionsService, monkeypatch: pytest.MonkeyPatch) -> None:
    assert EXECUTORS.get("aws") is AwsExecutor
    with pytest.raises(ConfigError, match=r"'function' is missing"):
        AwsExecutor(ExecutorContext(), {})
    with pytest.raises(ConfigError, match="'access_key' is not supported"):
        executor(service, access_key="AKIA")
    with pytest.raises(
        ConfigError, match=r"there is no function 'absent' in eu-west-1.*dglx lambda deploy absent"
    ):
        executor(service, function="absent")
    monkeypatch.setattr(clients, "MAX_TRIES", 1)
    with pytest.raises(PeerError, match="could not look for the function"):
        executor(service, endpoint_url="http://127.0.0.1:9")
    monkeypatch.setenv("AWS_PROFILE", "absent")
    with pytest.raises(ConfigError, match=r"absent.*aws configure"):
        executor(service)
    monkeypatch.delenv("AWS_PROFILE")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    with pytest.raises(ConfigError, match="aws configure"):
        executor(service)


def test_dollars_are_simulated_wherever_the_address_comes_from(
    service: FunctionsService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """boto3 takes one from its own settings, too; nobody is paid there either."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", service.url)
    with AwsExecutor(ExecutorContext(), {"function": NAME, "read_log": False}) as running:
        assert running.simulated
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    assert is_amazon(Place().client("lambda"))


def test_an_event_that_aws_does_not_take_is_lost_at_once(service: FunctionsService, tmp_path: Path) -> None:
    bench = Bench(gcn(), [7])
    (key, *_) = keys_of(bench.program)
    service.add("gone", write_image(tmp_path, ""))
    with serve(bench), executor(service, function="gone", read_log=False) as running:
        service.discard(service.functions.pop("gone"))
        running.invoke(bench.task(key))
        lost = list[Lost]()
        until(lambda: lost.extend(running.take_lost()) or lost, "lost")
    assert (lost[0].key, lost[0].attempt) == (key, 0)
    assert "Function not found" in lost[0].reason


def test_report_lines_are_read_as_aws_writes_them() -> None:
    request = "6f747ee1-8c0b-4d4a-a1d5-1d0c2f6c1a11"
    line = (
        f"REPORT RequestId: {request}\tDuration: 12.34 ms\tBilled Duration: 113 ms\tMemory Size: 192 MB\t"
        "Max Memory Used: 88 MB\tInit Duration: 100.60 ms\t\n"
    )
    for text, cold in ((line, True), (line.replace("Init Duration", "Other Duration"), False)):
        assert read_report(text) == (request, Invocation(duration_s=0.113, cold=cold, memory_mb=192))
    assert read_report(f"START RequestId: {request} Version: $LATEST") is None

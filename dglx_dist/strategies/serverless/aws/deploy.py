"""Deploys, tests and removes the AWS Lambda function for workers, and writes its image's context.

Each change is announced before it is made.
"""

import base64
import importlib.metadata
import json
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, final
from urllib.parse import urlsplit

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import dglx_dist
from dglx_dist.comm.auth import Credentials
from dglx_dist.comm.ledger import Ledger
from dglx_dist.comm.rendezvous import find_address_towards
from dglx_dist.comm.rpc import Handler, Rpc
from dglx_dist.comm.topology import Topology
from dglx_dist.errors import ConfigError, RemoteError
from dglx_dist.records import Array
from dglx_dist.strategies.serverless import worker as ops
from dglx_dist.strategies.serverless.aws.clients import (
    EVENT_AGE_S,
    MAX_TIMEOUT_S,
    TAG,
    Client,
    Deployment,
    Found,
    Place,
    check_name,
    explain_errors,
    found_or_none,
)
from dglx_dist.strategies.serverless.cut import CLASS_LABEL, capture
from dglx_dist.strategies.serverless.tasks import (
    Address,
    Direction,
    Secrets,
    Task,
    TaskComputation,
    TaskKey,
    attempt_name,
    half_rows,
    join_halves,
    parse_half,
)
from dglx_dist.strategies.serverless.tensor_program import RowKeys
from dglx_dist.strategies.serverless.worker import WorkerAnswer

_MANAGED_POLICIES = "arn:aws:iam::aws:policy/service-role/"
LOG_POLICY = f"{_MANAGED_POLICIES}AWSLambdaBasicExecutionRole"
VPC_POLICY = f"{_MANAGED_POLICIES}AWSLambdaVPCAccessExecutionRole"
"""LOG_POLICY plus the network interfaces that a function in a VPC needs."""
_TRUST_POLICY = {
    "Version": "2012-10-17",
    "Statement": [
        {"Effect": "Allow", "Principal": {"Service": "lambda.amazonaws.com"}, "Action": "sts:AssumeRole"}
    ],
}
ACTIVE_TIMEOUT_S = 300.0
"""Seconds until a function must be active. A VPC's first network interfaces take a minute or two."""
ROLE_TIMEOUT_S = 60.0
_NO_RETRIES = {"MaximumRetryAttempts": 0, "MaximumEventAgeInSeconds": EVENT_AGE_S}
_POLL_INTERVAL_S = 1
ROWS = 101
FEATURES_IN = 16
CLASSES = 4
TASK_TIMEOUT_S = 20.0
_MAX_LOG = 1500


@final
class Changes:
    """Announces each change to AWS, such as "create the function dglx-worker", and then makes it.

    After an error, the next deployment resumes with what is missing.
    """

    def __init__(self, say: Callable[[str], None], *, dry_run: bool = False) -> None:
        self._say = say
        self._dry_run = dry_run
        self.number = 0
        """Number of changes so far."""

    def __call__(self, text: str, call: Callable[..., Any], **arguments: object) -> Any:
        """Announce ``text`` and return ``call(**arguments)``, or None in a dry run.

        Raises ConfigError or PeerError if AWS rejects the call.
        """
        self.number += 1
        self._say(f"would {text}" if self._dry_run else text)
        if self._dry_run:
            return None
        with explain_errors(f"could not {text}"):
            return call(**arguments)


def deploy(deployment: Deployment, change: Changes) -> None:
    """Make the changes that ``deployment`` needs. Existing parts stay, so a second call resumes the first.

    Raises:
        ConfigError: credentials or permission are missing, the given role does not exist, or the name
            belongs to a function that dglx did not create.
        PeerError: AWS is unreachable.
    """
    client = deployment.place.client("lambda")
    name = deployment.name
    function = _own_function(client, name)
    settings = {
        "Role": _role_arn(deployment, change),
        "MemorySize": deployment.memory_mb,
        "Timeout": deployment.timeout_s,
        "VpcConfig": _vpc({"SubnetIds": deployment.subnets, "SecurityGroupIds": deployment.security_groups}),
    }
    if function is None:
        _create(deployment, settings, client, change)
    else:
        _update(deployment, settings, function, client, change)

    if function is None or not _drops_failures(client, name):
        # Otherwise AWS would run and bill a failed event twice more, after another attempt did its task.
        change(
            f"let {name} drop failed events: the controller resends them",
            client.put_function_event_invoke_config,
            FunctionName=name,
            **_NO_RETRIES,
        )


def _create(deployment: Deployment, settings: Mapping[str, Any], client: Client, change: Changes) -> None:
    subnets = f", VPC subnets {' '.join(deployment.subnets)}" if deployment.subnets else ""
    change(
        f"create the function {deployment.name}: memory {deployment.memory_mb} MB, "
        f"time-out {deployment.timeout_s} s, image {deployment.image}{subnets}",
        _create_function,
        client=client,
        FunctionName=deployment.name,
        Code={"ImageUri": deployment.image},
        PackageType="Image",
        Architectures=[deployment.architecture],
        Description="Workers of dglx_dist: tensor tasks of graph training",
        Tags={TAG: deployment.name},
        **settings,
    )
    _wait(client, deployment.name, change, "active")


def _update(
    deployment: Deployment, settings: Mapping[str, Any], function: Found, client: Client, change: Changes
) -> None:
    """Change the image and the settings of an existing ``function`` if they differ."""
    name = deployment.name
    configuration = function["Configuration"]
    # An earlier command may have been interrupted. AWS rejects changes until the earlier change is complete.
    if configuration.get("State") in ("Pending", "Failed"):
        _wait(client, name, change, "active")
    elif configuration.get("LastUpdateStatus") == "InProgress":
        _wait(client, name, change, "updated")

    image = function.get("Code", {}).get("ImageUri")
    architectures = configuration.get("Architectures", ["x86_64"])
    if image != deployment.image or architectures != [deployment.architecture]:
        change(
            f"update the image of {name} to {deployment.image}",
            client.update_function_code,
            FunctionName=name,
            ImageUri=deployment.image,
            Architectures=[deployment.architecture],
        )
        _wait(client, name, change, "updated")

    current_settings = {**configuration, "VpcConfig": _vpc(configuration.get("VpcConfig") or {})}
    new_settings = {key: value for key, value in settings.items() if current_settings.get(key) != value}
    if new_settings:
        update = client.update_function_configuration
        change(f"update {', '.join(new_settings)} of {name}", update, FunctionName=name, **new_settings)
        _wait(client, name, change, "updated")


def remove(name: str, place: Place, change: Changes) -> None:
    """Delete the function ``name``, the role created for it, and its log.

    A role given by the user stays. Errors as in :func:`deploy`.
    """
    check_name(name)
    client = place.client("lambda")
    iam = place.client("iam")
    logs = place.client("logs")
    function = _own_function(client, name)
    role = _find_role(iam, default_role(name))
    has_role = role is not None and _find_owner(role) == name

    # A log has no tag that names its creator, so it is deleted together with a function or role that has a
    # tag.
    group = f"/aws/lambda/{name}"
    has_log = False
    if function is not None or has_role:
        with explain_errors(f"could not look for the log {group}"):
            log_groups = logs.describe_log_groups(logGroupNamePrefix=group)["logGroups"]
        has_log = group in [log_group["logGroupName"] for log_group in log_groups]

    if function is not None:
        change(f"delete the function {name}", client.delete_function, FunctionName=name)
    if has_log:
        change(f"delete the log {group}", logs.delete_log_group, logGroupName=group)
    if has_role:
        change(f"delete the role {default_role(name)}", _delete_role, iam=iam, name=default_role(name))


def default_role(function: str) -> str:
    return f"{function}-role"


def _role_arn(deployment: Deployment, change: Changes) -> str | None:
    """Return the ARN for the given execution role, or for a role that is created for the function.

    Return None if a dry run does not create the role. Raises ConfigError if the given role does not exist.
    """
    role = deployment.role
    if role is not None and role.startswith("arn:"):
        return role

    iam = deployment.place.client("iam")
    if role is None:
        return _make_role(deployment, iam, change)
    existing_role = _find_role(iam, role)
    if existing_role is None:
        raise ConfigError(f"there is no role {role!r}; name an existing one, or none to create one")
    return str(existing_role["Arn"])


def _make_role(deployment: Deployment, iam: Client, change: Changes) -> str | None:
    """Create the function's default role, or complete an existing one, and return its ARN."""
    name = default_role(deployment.name)
    role = _find_role(iam, name)
    policies: list[str] = []
    if role is None:
        answer = change(
            f"create the role {name}",
            iam.create_role,
            RoleName=name,
            AssumeRolePolicyDocument=json.dumps(_TRUST_POLICY),
            Description=f"Workers of dglx_dist: function {deployment.name}",
            Tags=[{"Key": TAG, "Value": deployment.name}],
        )
        # A dry run has no answer.
        role = {"Arn": None} if answer is None else answer["Role"]
    elif _find_owner(role) != deployment.name:
        raise ConfigError(
            f"the role {name} exists and was not made for the function {deployment.name} by "
            "dglx; give it, or another one, with --role"
        )
    else:
        policies = _list_policies(iam, name)

    policy = VPC_POLICY if deployment.subnets else LOG_POLICY
    if policy not in policies:
        text = f"let the role {name} use {policy.removeprefix(_MANAGED_POLICIES)}"
        change(text, iam.attach_role_policy, RoleName=name, PolicyArn=policy)
    arn: str | None = role["Arn"]
    return arn


def _find_role(iam: Client, name: str) -> Found | None:
    missing = iam.exceptions.NoSuchEntityException
    answer = found_or_none(f"could not look for the role {name}", missing, iam.get_role, RoleName=name)
    return None if answer is None else answer["Role"]


def _list_policies(iam: Client, name: str) -> list[str]:
    with explain_errors(f"could not look at the role {name}"):
        policies = iam.list_attached_role_policies(RoleName=name)["AttachedPolicies"]
    return [str(policy["PolicyArn"]) for policy in policies]


def _delete_role(iam: Client, name: str) -> None:
    for policy in _list_policies(iam, name):
        iam.detach_role_policy(RoleName=name, PolicyArn=policy)
    iam.delete_role(RoleName=name)


def _find_owner(role: Found) -> object:
    """Return the function that dglx created ``role`` for, or None."""
    for tag in role.get("Tags") or ():
        if tag["Key"] == TAG:
            return tag["Value"]
    return None


def _own_function(client: Client, name: str) -> Found | None:
    """Return the function ``name``, or None. Raises ConfigError if dglx did not create the function."""
    purpose = f"could not look for the function {name}"
    missing = client.exceptions.ResourceNotFoundException
    function = found_or_none(purpose, missing, client.get_function, FunctionName=name)
    if function is not None and function.get("Tags", {}).get(TAG) != name:
        raise ConfigError(
            f"the function {name} exists and was not made by dglx, so it is left unchanged; "
            "choose another name"
        )

    return function


def _vpc(settings: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    # The ids are sorted for comparisons, because AWS returns them in any order.
    return {key: sorted(settings.get(key) or []) for key in ("SubnetIds", "SecurityGroupIds")}


def _create_function(client: Client, **arguments: object) -> None:
    """Create a function. Wait until AWS knows its new role everywhere."""
    deadline = time.monotonic() + ROLE_TIMEOUT_S
    while True:
        try:
            client.create_function(**arguments)
            return
        except client.exceptions.InvalidParameterValueException as error:
            if "assume" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(_POLL_INTERVAL_S)


def _wait(client: Client, name: str, change: Changes, until: str) -> None:
    waiter = client.get_waiter(f"function_{until}_v2")
    times = {"Delay": _POLL_INTERVAL_S, "MaxAttempts": int(ACTIVE_TIMEOUT_S / _POLL_INTERVAL_S)}
    change(f"wait until {name} is {until}", waiter.wait, FunctionName=name, WaiterConfig=times)


def _drops_failures(client: Client, name: str) -> bool:
    purpose = f"could not read how {name} treats failed events"
    missing = client.exceptions.ResourceNotFoundException
    read_config = client.get_function_event_invoke_config
    config = found_or_none(purpose, missing, read_config, FunctionName=name)
    return config is not None and _NO_RETRIES.items() <= config.items()


def try_function(
    name: str, place: Place, say: Callable[[str], None], *, address: str | None = None
) -> list[tuple[float, WorkerAnswer]]:
    """Run two small tasks in the function ``name``, the second in a warm container, and check their results.

    Return for each task the seconds until its answer, and the answer.

    Args:
        say: Called with a message that has the address at which this process serves.
        address: Numeric address at which the function can reach this machine. If None, the address by which
            this machine reaches AWS.

    Raises:
        ConfigError: the function does not exist, permission is missing, or its results are wrong.
        RemoteError: the function failed. The message ends with its log.
    """
    # The invocation is synchronous, so the client waits for a function's longest time-out.
    client = place.client("lambda", timeout_s=MAX_TIMEOUT_S + 10)
    url = urlsplit(client.meta.endpoint_url)
    secret = secrets.token_hex(32)
    if not address:
        port = url.port or 443
        address = find_address_towards(url.hostname, port, f"AWS at {url.hostname}", "give --address")
    # Another machine's address is refused here, with a message that says so.
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.bind((address, 0))
    except OSError as error:
        raise ConfigError(
            f"cannot listen at {address!r} here: {error}; give a numeric address of this machine"
        ) from error

    rpc = Rpc(0, Ledger(Topology(rank=0, world_size=1, server_of_rank=(0,))), TASK_TIMEOUT_S)
    try:
        trial = _Trial(rpc.listen(address, Credentials(secret=secret.encode())), secret)
        for op, handler in trial.handlers().items():
            rpc.register(op, handler)
        say(f"serving one interval of {ROWS} nodes at {trial.endpoint}")
        return [trial.run(client, name, epoch) for epoch in range(2)]
    finally:
        rpc.close()


class _Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES_IN, CLASSES)

    def forward(self, blocks: Any, x: Tensor) -> Tensor:
        result: Tensor = self.linear(x)
        return result


@final
class _Trial:
    """The servers for a small task, and the check on its results."""

    def __init__(self, endpoint: str, secret: str) -> None:
        self.endpoint = endpoint
        self._secret = secret
        captured = capture(_Linear(), FEATURES_IN).with_loss(cross_entropy, CLASS_LABEL, ROWS)
        self._program = captured.program
        self._work = TaskComputation(self._program, 0, Direction.FUSED)
        rng = np.random.default_rng(0)
        self._weights = [rng.normal(size=shape).astype(np.float32) for shape in self._work.weights.values()]
        rows = rng.normal(size=(ROWS, FEATURES_IN)).astype(np.float32)
        self._arrays: list[Array] = [rows, rng.integers(0, CLASSES, size=ROWS, dtype=np.int32)]
        self._results: dict[str, list[Array]] = {}
        """Received rows and gradients, by the call's name."""

    def handlers(self) -> dict[str, Handler]:
        program = np.frombuffer(self._program.to_json(), np.uint8)
        return {
            ops.PROGRAM: lambda _name, _arrays: [program],
            ops.PULL: self._send_half,
            ops.WEIGHTS: lambda _name, _arrays: self._weights,
            ops.GRADIENTS: self._receive,
            ops.SUBMIT: self._receive,
        }

    def run(self, client: Client, name: str, epoch: int) -> tuple[float, WorkerAnswer]:
        """Invoke the function ``name``. Return the seconds until its answer, and the answer."""
        own_address = Address(rank=0, host=socket.gethostname(), endpoint=self.endpoint)
        task = Task(
            key=TaskKey(epoch, 0, 0, Direction.FUSED),
            rows=ROWS,
            first_row=0,
            seed=0,
            program=self._program.digest,
            graph_server=own_address,
            parameter_server=own_address,
            secrets=Secrets(secret=self._secret),
            timeout_s=TASK_TIMEOUT_S,
        )
        start_s = time.perf_counter()
        with explain_errors(f"could not invoke the function {name}"):
            answer = client.invoke(
                FunctionName=name, InvocationType="RequestResponse", LogType="Tail", Payload=task.to_event()
            )
            payload = answer["Payload"].read()
        seconds = time.perf_counter() - start_s

        if "FunctionError" in answer:
            log = base64.b64decode(answer.get("LogResult", "")).decode(errors="replace")
            reason = _read_reason(payload)
            raise RemoteError(f"the function {name} failed: {reason}\n{log[-_MAX_LOG:].strip()}")
        worker_answer = WorkerAnswer.from_json(payload)
        self._check(name, task.key)
        return seconds, worker_answer

    def _check(self, name: str, key: TaskKey) -> None:
        """Raise ConfigError if results for the task ``key`` are missing or wrong."""
        first_name = attempt_name(key, 0, 0)
        second_name = attempt_name(key, 1, 0)
        if not self._results.keys() >= {first_name, second_name, str(key)}:
            raise ConfigError(f"the function {name} answered but sent no rows or gradients; deploy it again")

        rows = join_halves(self._work.given, self._results[first_name], self._results[second_name])
        keys = RowKeys(0, 0, torch.arange(ROWS))
        expected = self._work.compute_halves(self._weights, self._arrays, ROWS, keys)
        expected_results = [*expected.rows, *expected.gradients]

        # BLAS kernels for another processor round sums differently, so the bits may differ.
        for result, reference in zip([*rows, *self._results[str(key)]], expected_results, strict=True):
            if not np.allclose(result, reference, rtol=1e-4, atol=1e-5):
                worst = float(np.max(np.abs(result - reference)))
                raise ConfigError(
                    f"the results of the function {name} differ from this machine's by up to "
                    f"{worst:.3g}; build and deploy the image of this version"
                )

    def _send_half(self, name: str, _arrays: Sequence[Array]) -> list[Array]:
        _, half = parse_half(name)
        return [array[half_rows(ROWS, half)] for array in self._arrays]

    def _receive(self, name: str, arrays: Sequence[Array]) -> list[Array]:
        self._results[name] = list(arrays)
        return []


def _read_reason(payload: bytes) -> str:
    """Return the error message in a failed function's payload, or the payload itself."""
    try:
        answer = json.loads(payload)
    except ValueError:
        return payload[:_MAX_LOG].decode(errors="replace")
    if isinstance(answer, dict):
        answer = answer.get("errorMessage", answer)
    return str(answer)[:_MAX_LOG]


HANDLER = "dglx_dist.strategies.serverless.aws.function.handler"
_LIBRARIES = ("numpy", "numba", "pyzmq", "safetensors")
_DOCKERFILE = """\
# Workers of dglx_dist {version}. About 1 GB; AWS accepts 10 GB.
FROM public.ecr.aws/lambda/python:{python}
RUN pip install --no-cache-dir torch=={torch} --index-url https://download.pytorch.org/whl/cpu \\
 && pip install --no-cache-dir {libraries}
COPY dglx_dist ${{LAMBDA_TASK_ROOT}}/dglx_dist
# A function can write to /tmp only.
ENV OMP_NUM_THREADS=1 NUMBA_CACHE_DIR=/tmp/numba
CMD ["{handler}"]
"""


def write_context(folder: Path, python: str = "3.12") -> None:
    """Write a Dockerfile and the package's code to ``folder``, which must not exist or be empty.

    Args:
        python: Python version in the image.

    Raises:
        ConfigError: the folder has files.
    """
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty; give another folder, or remove its files")
    source = Path(dglx_dist.__file__).parent
    shutil.copytree(source, folder / "dglx_dist", ignore=shutil.ignore_patterns("__pycache__"))
    versions = {name: importlib.metadata.version(name) for name in ("torch", *_LIBRARIES)}
    # The image gets this machine's versions, because other versions may compute other bits.
    text = _DOCKERFILE.format(
        version=dglx_dist.__version__,
        python=python,
        torch=versions["torch"].partition("+")[0],
        libraries=" ".join(f"{name}=={versions[name]}" for name in _LIBRARIES),
        handler=HANDLER,
    )
    (folder / "Dockerfile").write_text(text, encoding="utf-8")

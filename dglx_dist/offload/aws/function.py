"""A function on AWS: what it is, what it should be, and the steps from one to the other."""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, final

from dglx_dist.errors import ConfigError, PeerError
from dglx_dist.offload.aws.clients import Client, explained, is_amazon
from dglx_dist.offload.aws.deployment import (
    EVENT_AGE_S,
    HANDLER,
    MAX_DIRECT_BYTES,
    TAG,
    Deployment,
)
from dglx_dist.offload.aws.role import Role
from dglx_dist.offload.aws.runtime import runtime_for
from dglx_dist.offload.aws.steps import Step

Found: TypeAlias = Mapping[str, Any]
"""What AWS says of a function: its answer, as boto3 reads it."""

ACTIVE_WITHIN_S = 300.0
"""Network cards in a VPC take a minute or two the first time."""
ROLE_KNOWN_WITHIN_S = 60.0
_PAUSE_S = 1.0


@final
class Function:
    """One function and how to bring it to what a deployment asks for.

    Args:
        deployment: What it should be.
        pause: Called with seconds to wait.

    Raises:
        ConfigError: AWS refuses to say what is there, or the name is taken by a function that is not of
            dglx_dist.
        PeerError: AWS cannot be reached.
    """

    def __init__(self, deployment: Deployment, pause: Callable[[float], None] = time.sleep) -> None:
        self._deployment, self._pause = deployment, pause
        self._client = deployment.place.client("lambda")
        self._zip = deployment.package.read_bytes()
        self._digest = base64.b64encode(hashlib.sha256(self._zip).digest()).decode()
        self._runtime = runtime_for(deployment, on_aws=is_amazon(self._client))
        self._role = Role(deployment)
        self._found = look(self._client, deployment.name)
        if self._found is not None:
            check_own(self._found, deployment.name)

    def steps(self) -> list[Step]:
        """Return what is to be done; nothing where all is as it should be."""
        name, found = self._deployment.name, self._found
        steps = [*self._role.steps]
        if found is None:
            settings = ", ".join(f"{key} {value}" for key, value in self._shown().items())
            steps += self._upload_steps()
            steps += [Step(f"create the function {name}: {settings}", self._create), self._wait("active")]
        else:
            steps += self._unfinished_steps(found) + self._code_steps(found) + self._setting_steps(found)
        if found is None or not self._drops_failures():
            steps.append(
                Step(f"have {name} drop events that fail: they are sent again here", self._drop_failures)
            )
        return steps

    def _shown(self) -> dict[str, object]:
        one = self._deployment
        vpc = {"VPC subnets": " ".join(one.subnets)} if one.subnets else {}
        shown = {"memory": f"{one.memory_mb} MB", "time-out": f"{one.timeout_s} s", "runtime": self._runtime}
        return {**shown, "package": f"{len(self._zip) / 1024**2:.1f} MB", **vpc}

    def _settings(self) -> dict[str, Any]:
        one = self._deployment
        # AWS tells them in an order of its own; sorted, they can be compared.
        vpc = {"SubnetIds": sorted(one.subnets), "SecurityGroupIds": sorted(one.security_groups)}
        return {
            "Role": self._role.arn,
            "Handler": HANDLER,
            "Runtime": self._runtime,
            "MemorySize": one.memory_mb,
            "Timeout": one.timeout_s,
            "VpcConfig": vpc,
        }

    def _unfinished_steps(self, found: Found) -> list[Step]:
        """An earlier command may have been ended while AWS was at work: until then it takes no change."""
        now = found["Configuration"]
        if now.get("State") in ("Pending", "Failed"):
            return [self._wait("active")]
        return [self._wait("updated")] if now.get("LastUpdateStatus") == "InProgress" else []

    def _code_steps(self, found: Found) -> list[Step]:
        now = found["Configuration"]
        architecture = now.get("Architectures", ["x86_64"])
        if now["CodeSha256"] == self._digest and architecture == [self._deployment.architecture]:
            return []
        name = self._deployment.name
        update = Step(f"update the code of {name} ({len(self._zip) / 1024**2:.1f} MB)", self._update_code)
        return [*self._upload_steps(), update, self._wait("updated")]

    def _setting_steps(self, found: Found) -> list[Step]:
        changed = [
            name for name, value in self._settings().items() if _now(found["Configuration"], name) != value
        ]
        if not changed:
            return []
        text = f"update {', '.join(changed)} of {self._deployment.name}"
        return [Step(text, lambda: self._update(changed)), self._wait("updated")]

    def _update(self, changed: list[str]) -> None:
        settings = self._settings()
        self._client.update_function_configuration(
            FunctionName=self._deployment.name, **{name: settings[name] for name in changed}
        )

    def _upload_steps(self) -> list[Step]:
        if self._by_bucket is None:
            return []
        return [Step(f"upload the package to s3://{self._by_bucket}/{self._object}", self._upload)]

    @property
    def _by_bucket(self) -> str | None:
        """The bucket, where the package is too large to go without one."""
        return self._deployment.bucket if len(self._zip) > MAX_DIRECT_BYTES else None

    @property
    def _object(self) -> str:
        return f"dglx/{self._deployment.name}-{hashlib.sha256(self._zip).hexdigest()[:16]}.zip"

    def _upload(self) -> None:
        storage = self._deployment.place.client("s3")
        storage.put_object(Bucket=self._by_bucket, Key=self._object, Body=self._zip)

    def _code(self) -> dict[str, Any]:
        if self._by_bucket is None:
            return {"ZipFile": self._zip}
        return {"S3Bucket": self._by_bucket, "S3Key": self._object}

    def _create(self) -> None:
        deadline = time.monotonic() + ROLE_KNOWN_WITHIN_S
        while True:
            try:
                self._client.create_function(
                    FunctionName=self._deployment.name,
                    Code=self._code(),
                    PackageType="Zip",
                    Architectures=[self._deployment.architecture],
                    Description="Workers of dglx_dist: tensor tasks of graph training",
                    Tags={TAG: self._deployment.name},
                    **self._settings(),
                )
            except self._client.exceptions.InvalidParameterValueException as error:
                # A role that was just made is not known everywhere at once.
                if "assume" not in str(error) or time.monotonic() > deadline:
                    raise
                self._pause(_PAUSE_S)
            else:
                return

    def _update_code(self) -> None:
        self._client.update_function_code(
            FunctionName=self._deployment.name,
            Architectures=[self._deployment.architecture],
            **self._code(),
        )

    def _wait(self, until: str) -> Step:
        name = self._deployment.name

        def wait() -> None:
            state, field = ("Active", "State") if until == "active" else ("Successful", "LastUpdateStatus")
            deadline = time.monotonic() + ACTIVE_WITHIN_S
            while True:
                now = self._client.get_function_configuration(FunctionName=name)
                found, reason = now.get(field, state), now.get(f"{field}Reason", "")
                if found == state:
                    return
                if found == "Failed":
                    raise ConfigError(
                        f"the function {name} cannot be used: {reason}; mend that, then `dglx lambda remove "
                        f"{name}` and deploy again"
                    )
                if time.monotonic() > deadline:
                    raise PeerError(
                        f"the function {name} is {found} after {ACTIVE_WITHIN_S:g} s ({reason}); run the "
                        "same command again, it goes on from there"
                    )
                self._pause(_PAUSE_S)

        return Step(f"wait until {name} is {until}", wait)

    def _drops_failures(self) -> bool:
        with explained(f"could not look at what {self._deployment.name} does with events that fail"):
            try:
                now = self._client.get_function_event_invoke_config(FunctionName=self._deployment.name)
            except self._client.exceptions.ResourceNotFoundException:
                return False
        return now.get("MaximumRetryAttempts") == 0 and now.get("MaximumEventAgeInSeconds") == EVENT_AGE_S

    def _drop_failures(self) -> None:
        # Else AWS runs a failed event twice more, for money, while its task is long done by another.
        self._client.put_function_event_invoke_config(
            FunctionName=self._deployment.name,
            MaximumRetryAttempts=0,
            MaximumEventAgeInSeconds=EVENT_AGE_S,
        )


def look(client: Client, name: str) -> Found | None:
    """Return what AWS says of the function ``name``; None where there is none.

    Raises:
        ConfigError, PeerError: AWS refuses to say, or cannot be reached.
    """
    with explained(f"could not look for the function {name}"):
        try:
            found: Found = client.get_function(FunctionName=name)
        except client.exceptions.ResourceNotFoundException:
            return None
    return found


def check_own(found: Found, name: str) -> None:
    """Raise ConfigError unless dglx made the function ``name``."""
    if found.get("Tags", {}).get(TAG) != name:
        raise ConfigError(
            f"the function {name} is there and was not made by dglx, which leaves it alone; choose "
            "another name"
        )


def _now(configuration: Found, name: str) -> object:
    """Return a setting in the form in which it is given."""
    value = configuration.get(name)
    if name != "VpcConfig":
        return value
    vpc = value or {}
    return {key: sorted(vpc.get(key) or []) for key in ("SubnetIds", "SecurityGroupIds")}

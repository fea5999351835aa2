"""The role as which a function runs: it may write its log, and join a VPC where it has to."""

from __future__ import annotations

import json
from typing import final

from dglx_dist.errors import ConfigError
from dglx_dist.offload.aws.clients import Client, explained
from dglx_dist.offload.aws.deployment import TAG, Deployment
from dglx_dist.offload.aws.steps import Step

_MANAGED = "arn:aws:iam::aws:policy/service-role/"
LOG_POLICY = f"{_MANAGED}AWSLambdaBasicExecutionRole"
VPC_POLICY = f"{_MANAGED}AWSLambdaVPCAccessExecutionRole"
"""As LOG_POLICY, and the network cards that a function has in a VPC."""
_TRUST = {
    "Version": "2012-10-17",
    "Statement": [
        {"Effect": "Allow", "Principal": {"Service": "lambda.amazonaws.com"}, "Action": "sts:AssumeRole"}
    ],
}


@final
class Role:
    """The role of one function: a given one is looked up, else one of the function's own is made.

    Raises:
        ConfigError: the given role does not exist, or the own one's name is taken by somebody else's.
        PeerError: AWS cannot be reached.
    """

    def __init__(self, deployment: Deployment) -> None:
        given = deployment.role
        self._arn = given if given is not None and given.startswith("arn:") else None
        self._name = given or own_role(deployment.name)
        self._function = deployment.name
        self.steps: list[Step] = []
        """What has to be done so that it is there."""
        if self._arn is not None:
            return
        self._iam = deployment.place.client("iam")
        found = look(self._iam, self._name)
        if found is not None:
            self._arn = str(found["Arn"])
        elif given is not None:
            raise ConfigError(f"there is no role {given!r}; name one that is there, or none to have one made")
        else:
            self.steps.append(Step(f"create the role {self._name}", self._create))
        if given is None:
            self._own_policy(VPC_POLICY if deployment.subnets else LOG_POLICY, found)

    @property
    def arn(self) -> str | None:
        """Its ARN; None while it is to be made."""
        return self._arn

    def _own_policy(self, policy: str, found: dict[str, object] | None) -> None:
        if found is not None:
            _check_own(found, self._name, self._function)
        if found is None or policy not in attached(self._iam, self._name):
            text = f"let the role {self._name} use {policy.removeprefix(_MANAGED)}"
            self.steps.append(Step(text, lambda: self._attach(policy)))

    def _create(self) -> None:
        made = self._iam.create_role(
            RoleName=self._name,
            AssumeRolePolicyDocument=json.dumps(_TRUST),
            Description=f"Workers of dglx_dist: function {self._function}",
            Tags=[{"Key": TAG, "Value": self._function}],
        )
        self._arn = str(made["Role"]["Arn"])

    def _attach(self, policy: str) -> None:
        self._iam.attach_role_policy(RoleName=self._name, PolicyArn=policy)


def own_role(function: str) -> str:
    """Return the name of the role that is made for ``function``."""
    return f"{function}-role"


def steps_to_remove(iam: Client, function: str) -> list[Step]:
    """Return what has to be done to remove the role made for ``function``; nothing where there is none.

    Raises:
        ConfigError, PeerError: AWS refuses to say, or cannot be reached.
    """
    name = own_role(function)
    found = look(iam, name)
    if found is None or _owner(found) != function:
        return []

    def delete() -> None:
        for policy in attached(iam, name):
            iam.detach_role_policy(RoleName=name, PolicyArn=policy)
        iam.delete_role(RoleName=name)

    return [Step(f"delete the role {name}", delete)]


def look(iam: Client, name: str) -> dict[str, object] | None:
    """Return the role ``name``; None where there is none."""
    with explained(f"could not look for the role {name}"):
        try:
            found = iam.get_role(RoleName=name)["Role"]
        except iam.exceptions.NoSuchEntityException:
            return None
    return dict(found)


def attached(iam: Client, name: str) -> list[str]:
    """Return the ARNs of the policies of the role ``name``."""
    with explained(f"could not look at the role {name}"):
        listed = iam.list_attached_role_policies(RoleName=name)["AttachedPolicies"]
    return [str(one["PolicyArn"]) for one in listed]


def _check_own(found: dict[str, object], name: str, function: str) -> None:
    if _owner(found) != function:
        raise ConfigError(
            f"the role {name} is there and was not made for the function {function} by dglx; give it, or "
            "another, with --role"
        )


def _owner(found: dict[str, object]) -> object:
    tags = found.get("Tags")
    listed = tags if isinstance(tags, list) else []
    return next((tag["Value"] for tag in listed if tag["Key"] == TAG), None)

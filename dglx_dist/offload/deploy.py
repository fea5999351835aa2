"""Puts workers on AWS and takes them away; says each change before it is made."""

from __future__ import annotations

from collections.abc import Callable

from dglx_dist.offload.aws.clients import Place, explained
from dglx_dist.offload.aws.deployment import Deployment, check_name
from dglx_dist.offload.aws.function import Function, check_own, look
from dglx_dist.offload.aws.role import steps_to_remove
from dglx_dist.offload.aws.steps import Step, carry_out


def plan(deployment: Deployment) -> tuple[str, ...]:
    """Return what :func:`deploy` would do, without doing it; nothing where all is as it should be.

    Raises:
        ConfigError: credentials or permission are missing, the given role does not exist, or the name is
            taken by a function that is not of dglx_dist.
        PeerError: AWS cannot be reached.
    """
    return tuple(step.text for step in Function(deployment).steps())


def deploy(deployment: Deployment, say: Callable[[str], None]) -> tuple[str, ...]:
    """Bring the function to what ``deployment`` says, and wait until it can be used.

    What is right already is left alone, so that to call it again goes on where it stopped, and a third time
    does nothing.

    Args:
        deployment: What it should be.
        say: Called with each change before it is made.

    Returns:
        The changes.

    Raises:
        ConfigError, PeerError: as :func:`plan`, or AWS refuses a change, or the function does not become
            usable.
    """
    steps = Function(deployment).steps()
    carry_out(steps, say)
    return tuple(step.text for step in steps)


def plan_removal(name: str, place: Place) -> tuple[str, ...]:
    """Return what :func:`remove` would do; nothing where there is no such function.

    Raises:
        ConfigError, PeerError: as :func:`plan`.
    """
    return tuple(step.text for step in _removal(name, place))


def remove(name: str, place: Place, say: Callable[[str], None]) -> tuple[str, ...]:
    """Delete the function ``name``, the role that was made for it, and its log; return what was done.

    A role that was given, and packages in S3, stay.

    Raises:
        ConfigError, PeerError: as :func:`deploy`.
    """
    steps = _removal(name, place)
    carry_out(steps, say)
    return tuple(step.text for step in steps)


def _removal(name: str, place: Place) -> list[Step]:
    check_name(name)
    client, steps = place.client("lambda"), list[Step]()
    found = look(client, name)
    if found is not None:
        check_own(found, name)
        steps.append(Step(f"delete the function {name}", lambda: client.delete_function(FunctionName=name)))
    of_role = steps_to_remove(place.client("iam"), name)
    # A log does not say who made it: it goes with the function or the role that do.
    of_log = _log_steps(name, place) if steps or of_role else []
    return [*steps, *of_log, *of_role]


def _log_steps(name: str, place: Place) -> list[Step]:
    logs, group = place.client("logs"), f"/aws/lambda/{name}"
    with explained(f"could not look for the log {group}"):
        listed = logs.describe_log_groups(logGroupNamePrefix=group)["logGroups"]
    if group not in [one["logGroupName"] for one in listed]:
        return []
    return [Step(f"delete the log {group}", lambda: logs.delete_log_group(logGroupName=group))]

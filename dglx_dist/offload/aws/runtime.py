"""Which runtime of AWS a package fits: its libraries are made for one Python, processor and C library."""

from __future__ import annotations

import re
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import final

from dglx_dist.errors import ConfigError
from dglx_dist.offload.aws.deployment import ARCHITECTURES, Deployment

_COMPILED = re.compile(r"\.cpython-3(?P<minor>\d+)-(?P<machine>\w+?)-linux-\w+\.so$")
_GLIBC = re.compile(rb"GLIBC_2\.(\d+)")
_AMAZON_2023 = 12
"""First minor version of Python whose runtime is Amazon Linux 2023; those before are Amazon Linux 2."""
_GLIBC_OF_AMAZON = {False: 26, True: 34}


@final
@dataclass(frozen=True, kw_only=True)
class Compiled:
    """What the compiled files of a package ask for; None where there are none."""

    python: int | None
    """Minor version: 12 for Python 3.12."""
    architecture: str | None
    """As AWS calls it: "x86_64" or "arm64"."""
    glibc: int | None
    """Minor version: 27 for glibc 2.27."""


def compiled_of(package: Path) -> Compiled:
    """Read what the zip ``package`` asks for.

    Raises:
        ConfigError: it is no zip, or holds files for several Pythons or processors.
    """
    pythons, machines, needed = set[int](), set[str](), set[int]()
    aws_name = {machine: name for name, machine in ARCHITECTURES.items()}
    try:
        with zipfile.ZipFile(package) as archive:
            for name in archive.namelist():
                if found := _COMPILED.search(name):
                    pythons.add(int(found["minor"]))
                    machines.add(aws_name.get(found["machine"], found["machine"]))
                if ".so" in Path(name).name:
                    needed |= {int(minor) for minor in _GLIBC.findall(archive.read(name))}
    except (zipfile.BadZipFile, OSError) as error:
        raise ConfigError(
            f"{package} is no package: {error}; write one with `dglx lambda package`"
        ) from error
    if len(pythons) > 1 or len(machines) > 1:
        raise ConfigError(
            f"{package} has files for minor versions {sorted(pythons)} of Python 3 on {sorted(machines)}; a "
            "function runs one: write it with `dglx lambda package --python`"
        )
    return Compiled(
        python=next(iter(pythons), None),
        architecture=next(iter(machines), None),
        glibc=max(needed, default=None),
    )


def runtime_for(deployment: Deployment, *, on_aws: bool) -> str:
    """Return the runtime for ``deployment``: the one asked for, else that of its package.

    Args:
        deployment: What the function should be.
        on_aws: Whether it will run on AWS itself, whose C libraries are known.

    Raises:
        ConfigError: the package's libraries cannot be loaded there.
    """
    compiled = compiled_of(deployment.package)
    minor = sys.version_info.minor if compiled.python is None else compiled.python
    runtime = deployment.runtime or f"python3.{minor}"
    if compiled.python is not None and runtime != f"python3.{minor}":
        raise ConfigError(
            f"{deployment.package} is made for Python 3.{minor} and the runtime is {runtime}; write it with "
            f"`dglx lambda package --python {runtime.removeprefix('python')}`"
        )
    if compiled.architecture not in (None, deployment.architecture):
        raise ConfigError(
            f"{deployment.package} is made for {compiled.architecture} and the function is to run on "
            f"{deployment.architecture}; give --architecture to `dglx lambda package` and `deploy` alike"
        )
    if on_aws and (lacks := what_aws_lacks(deployment.package)):
        raise ConfigError(lacks)
    return runtime


def what_aws_lacks(package: Path) -> str:
    """Return why AWS cannot load the libraries of ``package``, and what to do; "" where it can.

    Raises:
        ConfigError: as :func:`compiled_of`.
    """
    compiled = compiled_of(package)
    has = _GLIBC_OF_AMAZON[(compiled.python or _AMAZON_2023) >= _AMAZON_2023]
    if compiled.glibc is None or compiled.glibc <= has:
        return ""
    return (
        f"{package} needs glibc 2.{compiled.glibc} and AWS's Python 3.{compiled.python} has 2.{has}; write "
        f"it with `dglx lambda package --python 3.{_AMAZON_2023}`"
    )

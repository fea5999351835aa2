"""Installs DGL on Python versions for which its project has no wheel.

Tested with DGL 2.1.0 on Python 3.13. The libraries in a DGL wheel work with every Python version. Only one
Cython module does not, and DGL calls its library through ctypes if that module is missing. So this module
downloads the wheel for CPython 3.12 and checks its hash. It makes a copy without the Cython module, tagged
for every Python 3, and pip installs the copy.
"""

import hashlib
import re
import subprocess
import sys
import tempfile
from base64 import urlsafe_b64encode
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from zipfile import ZipFile

from dglx_dist.errors import ConfigError

VERSION = "2.1.0"
_WHEEL_PYTHON = "3.12"
"""Python version that the downloaded wheel is for."""
SHA256 = (
    "af9b5974d667d11b9b2dc153981241c248a314c1a54880d4a2af12a00470b78d",  # x86_64
    "0f8605418e71191f7a4b43a5a6597e655512c7a48171ac042993d77c676f3092",  # aarch64
)
"""Hashes of the DGL 2.1.0 wheels for CPython 3.12 on PyPI."""
_CYTHON_MODULE = "/_cy3/core.cpython-"


def has_official_wheel() -> bool:
    """Return whether DGL's project has wheels for this Python version."""
    return sys.version_info < (3, 13)


def find_version() -> str | None:
    """Return the installed DGL's version, or None if there is none."""
    try:
        return metadata.version("dgl")
    except metadata.PackageNotFoundError:
        return None


def describe_calls() -> str:
    """Return how DGL calls its library: ``cython``, or ``ctypes``, which is slower for small calls."""
    return "cython" if any(name.startswith("dgl._ffi._cy3.core") for name in sys.modules) else "ctypes"


def install_wheel(sha256: Sequence[str] = SHA256) -> None:
    """Download DGL's wheel for another Python, and install it into this environment.

    Raises:
        ConfigError: pip is missing, cannot get a wheel with a matching hash, or cannot install it.
    """
    with tempfile.TemporaryDirectory(prefix="dglx-dgl-") as name:
        folder = Path(name)
        requirement = folder / "dgl.txt"
        hashes = " ".join(f"--hash=sha256:{digest}" for digest in sha256)
        requirement.write_text(f"dgl=={VERSION} {hashes}\n")
        _run_pip(
            "download", "--no-deps", "--only-binary=:all:", "--python-version", _WHEEL_PYTHON,
            "--dest", str(folder), "--requirement", str(requirement),
        )  # fmt: skip
        (wheel,) = folder.glob("dgl-*.whl")
        _run_pip("install", "--no-deps", "--no-index", "--force-reinstall", str(retag_wheel(wheel)))


def retag_wheel(wheel: Path) -> Path:
    """Write a copy of ``wheel`` for every Python 3 beside it, without the Cython module. Return its path."""
    name, version, _, _, platform = wheel.stem.split("-")
    info = f"{name}-{version}.dist-info"
    tag = f"Tag: py3-none-{platform}"
    copy = wheel.with_name(f"{name}-{version}-py3-none-{platform}.whl")
    record = []
    with ZipFile(wheel) as source, ZipFile(copy, "w") as target:
        for entry in source.infolist():
            if _CYTHON_MODULE in entry.filename or entry.filename == f"{info}/RECORD":
                continue
            content = source.read(entry)
            if entry.filename == f"{info}/WHEEL":
                content = re.sub(r"^Tag: .*$", tag, content.decode(), flags=re.MULTILINE).encode()
            target.writestr(entry, content)
            digest = urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            record.append(f"{entry.filename},sha256={digest},{len(content)}\n")
        target.writestr(f"{info}/RECORD", "".join([*record, f"{info}/RECORD,,\n"]))

    return copy


def _run_pip(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", *arguments, "--quiet", "--disable-pip-version-check"],
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ConfigError(f"DGL {VERSION} could not be installed. pip {arguments[0]}: {done.stderr.strip()}")

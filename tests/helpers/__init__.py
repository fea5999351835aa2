"""Helpers of the tests."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def wide(*cases: Any) -> list[Any]:
    """Return ``cases``, each the values of one run of a test, as parameters that need --all."""
    values = (case if isinstance(case, tuple) else (case,) for case in cases)
    return [pytest.param(*case, marks=pytest.mark.wide) for case in values]


def wait_for_checkpoints(folder: str | Path, number: int) -> None:
    """Wait until ``folder`` has that many complete ones: they are written on a thread."""
    deadline = time.monotonic() + 60
    while len(list(Path(folder).glob("epoch-*-step-?????????/state.json"))) < number:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def refusal(call: Callable[[], object], kind: type[Exception] = Exception) -> str:
    """Return what the error of ``call`` says; "" if it raises none of ``kind``."""
    try:
        call()
    except kind as error:
        return str(error)
    return ""

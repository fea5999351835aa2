"""Helpers of the tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def wide(*cases: Any) -> list[Any]:
    """Return ``cases``, each the values of one run of a test, as parameters that need --all."""
    values = (case if isinstance(case, tuple) else (case,) for case in cases)
    return [pytest.param(*case, marks=pytest.mark.wide) for case in values]


def refusal(call: Callable[[], object], kind: type[Exception] = Exception) -> str:
    """Return what the error of ``call`` says; "" if it raises none of ``kind``."""
    try:
        call()
    except kind as error:
        return str(error)
    return ""

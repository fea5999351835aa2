"""Exceptions that dglx_dist raises."""

import re
from collections.abc import Iterable


class DglxError(Exception):
    """Base class for all errors in this package. The message has the name, the value and the remedy."""

    is_shown_elsewhere = False
    """Whether another rank shows the error if it is not caught."""


def shorten_list(names: Iterable[object], most: int = 3) -> str:
    """Join ``names`` with commas, and cut a long list, as in "a, b, c and 42 more"."""
    shown = [str(name) for name in names]
    more = f" and {len(shown) - most} more" if len(shown) > most + 1 else ""
    return ", ".join(shown[:most] if more else shown) + more


def first_sentence(error: BaseException) -> str:
    """Return the error's message without the reasons and the remedy that follow."""
    return re.split(r"[;:] |\. (?=[A-Z])", str(error), maxsplit=1)[0].removesuffix(".")


class ConfigError(DglxError, ValueError):
    """An option or argument is invalid, or several cannot be combined."""


class UnknownNameError(ConfigError):
    """A plugin name is not registered. The message lists the known names and suggests the nearest one."""


class DatasetError(DglxError, ValueError):
    """Input data is wrong. The message names the file, the column and the first wrong row."""


class StorageError(DglxError):
    """A partitioned dataset on disk is missing, incomplete, damaged or in another format version."""


class PeerError(DglxError, ConnectionError):
    """Another rank has ended or does not answer. The message names the rank and the request."""


class RemoteError(DglxError):
    """A remote call raised an error in its handler. The message contains the error's text."""


class CheckpointError(DglxError):
    """A checkpoint is missing or damaged, or does not match the model, optimizer or dataset."""


class Stopped(SystemExit):
    """Training has stopped on all ranks because one rank received a signal. A checkpoint is saved.

    If this exception is not caught, Python ends without a traceback, and the exit code is 75 (EX_TEMPFAIL:
    start it again).
    """

    EXIT_CODE = 75

    def __init__(self, epoch: int, step: int, folder: object) -> None:
        super().__init__(self.EXIT_CODE)
        self.args = (
            f"stopped after step {step} of epoch {epoch}, because a rank received a signal or its launcher "
            f"ended. A checkpoint is saved in {folder}. Run the same command again to resume.",
        )

"""Every exception that dglx_dist raises on purpose."""

from __future__ import annotations


class DglxError(Exception):
    """Base of every error that dglx_dist raises on purpose; its text says what, where and the way out."""


class ConfigError(DglxError, ValueError):
    """An option, argument or combination of both cannot be honoured."""


class UnknownNameError(ConfigError):
    """A plugin name that no registry entry has; the message lists what exists and the nearest one."""


class DatasetError(DglxError, ValueError):
    """Input data is wrong: the message names the file, the column and the first offending row."""


class StorageError(DglxError):
    """A partitioned dataset on disk is missing, incomplete, damaged or of another format version."""


class PeerError(DglxError, ConnectionError):
    """Another rank is dead or silent; the message names it and what was asked of it."""


class RemoteError(DglxError):
    """A one-sided call reached its rank, and the handler there raised; the message carries its text."""


class CheckpointError(DglxError):
    """A checkpoint is missing, incomplete, or of a model, optimizer or dataset that does not match."""


class JobError(DglxError):
    """A job of the bench failed, died or hung on a rank; the message names the rank and ends with its log."""


class LabError(DglxError):
    """An emulated server could not be made, entered or taken down; the message has the host's answer."""


class CommandError(DglxError):
    """A command on the servers of a lab failed; the message says who was first, and ends with its output."""

"""What an invocation of a worker answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from dglx_dist.errors import ConfigError
from dglx_dist.offload.fields import Fields, Json, printable, read_json
from dglx_dist.offload.tasks import MAX_ATTEMPT, TaskKey

MAX_ANSWER_BYTES = 64 * 1024
_LONGEST_ERROR = 4000


@final
@dataclass(frozen=True, kw_only=True)
class WorkerAnswer:
    """How a task ended in a worker that is still alive."""

    key: TaskKey
    attempt: int
    accepted: bool
    """Whether the graph server took the rows; False: it had them already."""
    seconds: float
    """From the event to the end."""
    cold: bool
    """Whether it was the first task of its worker."""
    error: str = ""
    """Why it failed; "" where it did not."""

    def as_json(self) -> dict[str, Json]:
        """Return what JSON has room for."""
        return {**vars(self), "key": str(self.key), "error": printable(self.error, _LONGEST_ERROR)}

    @classmethod
    def from_json(cls, text: bytes | str) -> WorkerAnswer:
        """Read the JSON text of :meth:`as_json`.

        Raises:
            ConfigError: it is none.
        """
        fields = Fields(read_json(text, MAX_ANSWER_BYTES, "a worker's answer"), "a worker's answer")
        error = fields.any("error")
        if not isinstance(error, str):
            raise ConfigError("a worker's answer has an 'error' that is no text")
        answer = cls(
            key=TaskKey.parse(fields.text("key", 64)),
            attempt=fields.whole("attempt", 0, MAX_ATTEMPT),
            accepted=fields.flag("accepted"),
            seconds=fields.number("seconds", 0, 1e9),
            cold=fields.flag("cold"),
            error=printable(error, _LONGEST_ERROR),
        )
        fields.end()
        return answer

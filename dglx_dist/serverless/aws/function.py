"""Entry point of a function: ``dglx_dist.serverless.aws.function.handler``."""

from __future__ import annotations

import base64
from collections.abc import Mapping

from dglx_dist.errors import ConfigError
from dglx_dist.serverless.json_fields import Json
from dglx_dist.serverless.worker import RemoteCaller, Worker, register_packaged_stages

register_packaged_stages()
# A functions service keeps the modules of a warm container and nothing else, so what is to last from one
# invocation to the next lives in one; no connection is opened before the first event.
_WORKER = Worker(RemoteCaller())


def handler(event: object, context: object = None) -> dict[str, Json]:
    """Do the task of ``event``; see ``Worker.handle``.

    Args:
        event: The task, or an HTTP request in AWS's form whose body is the task.
        context: Not looked at.

    Raises:
        DglxError: the event is no task, or the task went wrong.
    """
    request = event if isinstance(event, Mapping) else {}
    body = request.get("body")
    if not isinstance(body, str):
        return _WORKER.handle(event, context)
    return _WORKER.handle(_decoded(body) if request.get("isBase64Encoded") is True else body, context)


def _decoded(body: str) -> bytes:
    try:
        return base64.b64decode(body, validate=True)
    except ValueError as error:  # of which binascii's own is a kind
        raise ConfigError(f"the body of a request is no base64: {error}; send the task as JSON") from None

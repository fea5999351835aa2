"""Entry point for the AWS Lambda function."""

import base64
from collections.abc import Mapping

from dglx_dist.data.json_fields import Json
from dglx_dist.errors import ConfigError
from dglx_dist.strategies.serverless.worker import RemoteCaller, Worker

# A functions service keeps a warm container's modules and nothing else, so the state between invocations is a
# module variable. No connection is opened before the first event.
_WORKER = Worker(RemoteCaller())


def handler(event: object, context: object = None) -> dict[str, Json]:
    """Run the task in ``event``, or in its body if it is an HTTP request; see ``Worker.handle``."""
    request = event if isinstance(event, Mapping) else {}
    body = request.get("body")
    if not isinstance(body, str):
        return _WORKER.handle(event, context)
    return _WORKER.handle(_decode(body) if request.get("isBase64Encoded") is True else body, context)


def _decode(body: str) -> bytes:
    try:
        return base64.b64decode(body, validate=True)
    except ValueError as error:  # includes binascii.Error
        raise ConfigError(f"the body of a request is not base64: {error}; send the task as JSON") from None

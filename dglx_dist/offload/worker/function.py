"""Entry point of a function: ``dglx_dist.offload.worker.function.handler``."""

from __future__ import annotations

from dglx_dist.offload.worker.caller import RemoteCaller
from dglx_dist.offload.worker.handler import Worker
from dglx_dist.offload.worker.packaged import register_packaged_stages

register_packaged_stages()
# A functions service keeps the modules of a warm container and nothing else, so what is to last from one
# invocation to the next lives in one; no connection is opened before the first event.
handler = Worker(RemoteCaller()).handle

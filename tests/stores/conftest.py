"""A stand-in for S3, a fresh bucket, and a cache of the test."""

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("boto3")
pytest.importorskip("flask")
pytest.importorskip("moto")

from dglx_dist.data.storage import object_store
from tests.helpers.object_store import StandIn, serve

SECRET = "test-secret-key"


@pytest.fixture(scope="session")
def service() -> Iterator[StandIn]:
    with serve() as running:
        yield running


@pytest.fixture
def store(service: StandIn, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """The service without faults, counts or requests of other tests, found through the environment."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", service.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test-id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    # Waits between attempts are real, but short.
    monkeypatch.setattr(object_store, "PAUSE_S", 0.001)
    service.faults.clear()
    service.requests.clear()
    service.sent.clear()
    yield service
    assert not service.faults, "the test expected more requests than there were"


@pytest.fixture
def bucket(store: StandIn) -> str:
    name = f"test-{uuid.uuid4().hex[:12]}"
    store.client().create_bucket(Bucket=name)
    return name


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("DGLX_DATASET_CACHE", str(folder))
    return folder

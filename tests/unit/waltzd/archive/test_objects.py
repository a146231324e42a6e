"""Buckets as stores: the contract in obstore's memory and on an S3 server, and how its errors are told."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import obstore.store
import pytest

from tests.store_contract import StoreContract
from waltzd.archive.location import open_store
from waltzd.archive.objects import ObjectStore
from waltzd.archive.store import Store
from waltzd.errors import BadArgument
from waltzd.errors.operations import StoreRefused, StoreUnavailable

server = pytest.importorskip("moto.server", reason="the S3 server comes with the packages of developers")
NUMBERS = itertools.count(1)


class TestMemory(StoreContract):
    @pytest.fixture
    def store(self) -> Store:
        return ObjectStore(obstore.store.MemoryStore(), "memory")


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    running = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    yield f"http://{host}:{port}"
    running.stop()


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"ACCESS_KEY_ID": "who", "SECRET_ACCESS_KEY": "what", "REGION": "us-east-1"}
    for name, value in settings.items():
        monkeypatch.setenv(f"AWS_{name}", value)


def s3(endpoint: str, bucket: str, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    monkeypatch.setenv("AWS_ENDPOINT", endpoint)
    return ObjectStore.at(f"s3://{bucket}/some/folder")


def bucket(endpoint: str) -> str:
    import boto3

    name = f"bucket-{next(NUMBERS)}"
    client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1")
    client.create_bucket(Bucket=name)
    return name


class TestS3(StoreContract):
    @pytest.fixture
    def store(self, endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Store:
        return s3(endpoint, bucket(endpoint), monkeypatch)


def test_a_bucket_that_is_not_there_is_refused(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = s3(endpoint, "missing", monkeypatch)
    with pytest.raises(StoreRefused, match="NoSuchBucket"):
        store.put_new("a", b"x")
    with pytest.raises(StoreUnavailable, match="NoSuchBucket"):
        store.list("")


def test_a_server_that_is_not_there_is_not_available(monkeypatch: pytest.MonkeyPatch) -> None:
    store = s3("http://127.0.0.1:9", "missing", monkeypatch)
    with pytest.raises(StoreUnavailable, match="missing/some/folder"):
        store.head("a")


def test_an_address_of_a_bucket_is_one() -> None:
    assert open_store("s3://bucket/folder").place == "s3://bucket/folder"
    with pytest.raises(BadArgument, match="is not the URL of an object store"):
        ObjectStore.at("nonsense://bucket")

"""A bucket of S3, GCS or Azure as a store of objects, through obstore, which comes with the extra `archive`.

Credentials and end points come from where the store's own tools take them: the environment, or the machine's identity. They
are read again when they expire, and stand in no setting of Waltz. Objects are made by conditional puts, which S3, GCS and
Azure have; a store that lacks them refuses the first write.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from waltzd.archive.store import Listed, is_object_name
from waltzd.disk.seam import Buffer
from waltzd.errors import BadArgument, NotInstalled, ObjectAbsent, ObjectExists, StoreRefused, StoreUnavailable, WaltzError

try:
    import obstore
    import obstore.store
    from obstore import exceptions
except ImportError as error:
    raise NotInstalled("the package obstore, which speaks to object stores, is not installed", extra="archive") from error

if TYPE_CHECKING:
    from obstore.store import ObjectStore as Bucket

CONNECT_SECONDS, CALL_SECONDS, RETRY_SECONDS = 5, 120, 20
RETRIES_MAX = 2
"""The caller tries again by itself, later and later: what is retried in here only bridges a connection that was closed."""


class ObjectStore:
    def __init__(self, bucket: Bucket, place: str) -> None:
        self._bucket = bucket
        self._place = place

    @staticmethod
    def at(url: str) -> ObjectStore:
        """By its address, as in s3://bucket/folder."""
        try:
            bucket = obstore.store.from_url(
                url,
                client_options={
                    "connect_timeout": timedelta(seconds=CONNECT_SECONDS),
                    "timeout": timedelta(seconds=CALL_SECONDS),
                    "allow_http": True,  # only an end point that says so has it
                },
                retry_config={"max_retries": RETRIES_MAX, "retry_timeout": timedelta(seconds=RETRY_SECONDS)},
            )
        except (exceptions.BaseError, ValueError) as error:
            raise BadArgument(f"{url} is no address of an object store: {_said(error)}") from error
        return ObjectStore(bucket, url)

    @property
    def place(self) -> str:
        return self._place

    def put_new(self, name: str, data: Buffer) -> str:
        with self._translated(name, is_write=True):
            return self._put(name, data, "create")

    def put_if(self, name: str, data: Buffer, tag: str) -> str:
        self.head(name)
        with self._translated(name):
            return self._put(name, data, {"e_tag": tag})

    def _put(self, name: str, data: Buffer, mode: Any) -> str:
        assert is_object_name(name), name
        done = obstore.put(self._bucket, name, memoryview(data).cast("B"), mode=mode, use_multipart=False)
        return done["e_tag"] or ""

    def get_range(self, name: str, offset: int, size: int) -> bytes:
        try:
            with self._translated(name):
                return bytes(obstore.get_range(self._bucket, name, start=offset, length=size)) if size else b""
        except StoreUnavailable:  # what begins behind the end is an error in each store, and of no kind of its own
            if offset < self.head(name).size:
                raise
            return b""

    def list(self, folder: str) -> list[Listed]:
        with self._translated(folder or "the list of objects"):
            pages = obstore.list(self._bucket, folder or None)
            found = (Listed(one["path"], one["size"], one["e_tag"] or "") for page in pages for one in page)
            return sorted(one for one in found if is_object_name(one.name))

    def head(self, name: str) -> Listed:
        with self._translated(name):
            found = obstore.head(self._bucket, name)
        return Listed(name, found["size"], found["e_tag"] or "")

    def remove(self, name: str) -> None:
        try:
            with self._translated(name):
                obstore.delete(self._bucket, name)
        except ObjectAbsent:
            return

    @contextmanager
    def _translated(self, what: str, *, is_write: bool = False) -> Iterator[None]:
        """`is_write`: the call needs no object, so what is absent is the bucket."""
        try:
            yield
        except (exceptions.BaseError, OSError, ValueError, NotImplementedError) as error:
            raise self._error(error, what, is_write=is_write) from error

    def _error(self, error: Exception, what: str, *, is_write: bool) -> WaltzError:
        said = f"{self.place}: {what}: {_said(error)}"
        if isinstance(error, exceptions.AlreadyExistsError | exceptions.PreconditionError):
            return ObjectExists(said)
        if isinstance(error, FileNotFoundError):
            return StoreRefused(said) if is_write else ObjectAbsent(said)
        refusals = (
            exceptions.PermissionDeniedError,
            exceptions.UnauthenticatedError,
            exceptions.InvalidPathError,
            NotImplementedError,
        )
        return StoreRefused(said) if isinstance(error, refusals) else StoreUnavailable(said)


def _said(error: Exception) -> str:
    """Without what it says for people who work on obstore."""
    return " ".join(str(error).partition("\n\nDebug source")[0].split()) or type(error).__name__

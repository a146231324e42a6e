"""A bucket of S3, GCS or Azure as an object store, through obstore, which the extra `archive` installs.

Credentials and endpoints are read from where the tools of the store read them: the environment, or the identity of the
machine. They are read again when they expire; no setting of Waltz holds them. Objects are created by conditional puts,
which S3, GCS and Azure support; a store without them rejects the first write."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from waltzd.archive.store import Listed, is_object_name
from waltzd.disk.seam import Buffer
from waltzd.errors import BadArgument, WaltzError
from waltzd.errors.operations import NotInstalled, ObjectAbsent, ObjectExists, StoreRefused, StoreUnavailable

try:
    import obstore
    import obstore.store
    from obstore import exceptions
except ImportError as error:
    raise NotInstalled("the package obstore, the client of object stores, is not installed", extra="archive") from error

if TYPE_CHECKING:
    from obstore.store import ObjectStore as Bucket

CONNECT_SECONDS, CALL_SECONDS, RETRY_SECONDS = 5, 120, 20
RETRIES_MAX = 2
"""Number of retries within a call, for connections that were closed. Callers retry with back-off by themselves."""


class ObjectStore:
    def __init__(self, bucket: Bucket, place: str) -> None:
        self._bucket = bucket
        self._place = place

    @staticmethod
    def at(url: str) -> ObjectStore:
        """Open the bucket at a URL such as s3://bucket/folder."""
        try:
            bucket = obstore.store.from_url(
                url,
                client_options={
                    "connect_timeout": timedelta(seconds=CONNECT_SECONDS),
                    "timeout": timedelta(seconds=CALL_SECONDS),
                    "allow_http": True,  # used only for endpoints whose URL says http
                },
                retry_config={"max_retries": RETRIES_MAX, "retry_timeout": timedelta(seconds=RETRY_SECONDS)},
            )
        except (exceptions.BaseError, ValueError) as error:
            raise BadArgument(f"{url} is not the URL of an object store: {_said(error)}") from error
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
        except StoreUnavailable:  # also raised for a range past the end of the object
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
        """Raise errors of obstore as errors of a store. `is_write`: if something is absent, it is the bucket."""
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
    """Return the message of an error without its debug output."""
    return " ".join(str(error).partition("\n\nDebug source")[0].split()) or type(error).__name__

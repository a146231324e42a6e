"""`BlockingCluster`: a `LocalCluster` for tests without an event loop, on the thread of the blocking clients.

So a test of a synchronous application, of Flask, Django or Starlette's `TestClient`, starts a cluster, gives its address to
the application, and asks the cluster what is true, without a line of asyncio."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import Any, Self, TypeVar
from uuid import UUID

from waltzd.client.blocking import BlockingClient, loop_thread
from waltzd.client.client import Client
from waltzd.client.routes import Connect
from waltzd.client.view import E, Serializer, View
from waltzd.format.record import Record
from waltzd.testing.cluster import READY_SECONDS, LocalCluster

T = TypeVar("T")


class BlockingCluster:
    """`LocalCluster` for tests without an event loop: the same calls, and each blocks. May be called from any thread.

    With pytest, the fixture `blocking_waltz_cluster` is one that runs; the mark `waltz` says how large it is.

    Example:
        ```python
        with BlockingCluster() as cluster, cluster.client() as client:
            cluster.kill_owner(0)
            assert client.append(b"hello", partition=0).id == 0
        ```
    """

    def __init__(self, **size: Any) -> None:
        """Arguments and errors are those of `LocalCluster`."""
        self._cluster = LocalCluster(**size)
        self._thread = loop_thread()

    def _wait_for(self, work: Callable[..., Coroutine[Any, Any, T]], *arguments: Any) -> T:
        return self._thread.run(work(*arguments))

    def _call(self, function: Callable[..., T], *arguments: Any, **named: Any) -> T:
        async def call() -> T:
            return function(*arguments, **named)

        return self._thread.run(call())

    # -- life

    def start(self) -> None:
        """As `LocalCluster.start`."""
        self._wait_for(self._cluster.start)

    def close(self) -> None:
        """As `LocalCluster.close`."""
        self._wait_for(self._cluster.close)

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def wait_until_ready(self, seconds: float = READY_SECONDS) -> None:
        """As `LocalCluster.wait_until_ready`."""
        self._wait_for(self._cluster.wait_until_ready, seconds)

    # -- for applications

    @property
    def servers(self) -> tuple[str, ...]:
        """The addresses of all servers; only `connect` understands them."""
        return self._cluster.servers

    @property
    def connect(self) -> Connect:
        """What a `Client` or a `BlockingClient` takes as its `connect`, on whichever event loop it lives."""
        return self._cluster.connect

    def client(
        self,
        *,
        name: str | None = None,
        view: View[E] | None = None,
        serializer: Serializer[E] | None = None,
        **settings: Any,
    ) -> BlockingClient[E]:
        """A `BlockingClient` of this cluster, with its keyword arguments; use it with `with`. `name`: as of
        `LocalCluster.client`."""
        connect = self._cluster.connect_as(name)
        return BlockingClient(self.servers, connect=connect, view=view, serializer=serializer, **settings)

    def asyncio_client(
        self,
        *,
        name: str | None = None,
        view: View[E] | None = None,
        serializer: Serializer[E] | None = None,
        **settings: Any,
    ) -> Client[E]:
        """A `Client` of this cluster for an application with a loop of its own, which a `TestClient` runs, say."""
        return self._cluster.client(name=name, view=view, serializer=serializer, **settings)

    def set_policy(self, grants: Sequence[Mapping[str, Any]] | None) -> None:
        """As `LocalCluster.set_policy`."""
        self._call(self._cluster.set_policy, grants)

    def set_channels(self, channels: Mapping[str, str]) -> None:
        """As `LocalCluster.set_channels`."""
        self._call(self._cluster.set_channels, channels)

    def log(self, partition: int = 0) -> list[Record]:
        """As `LocalCluster.log`."""
        return self._wait_for(self._cluster.log, partition)

    def owner(self, partition: int = 0) -> str:
        """As `LocalCluster.owner`."""
        return self._call(self._cluster.owner, partition)

    def end_position(self, partition: int = 0) -> int:
        """As `LocalCluster.end_position`."""
        return self._call(self._cluster.end_position, partition)

    def set_time(self, time: datetime | int | None) -> None:
        """As `LocalCluster.set_time`."""
        self._call(self._cluster.set_time, time)

    # -- bad luck for applications

    def force_next_lock_failure(self, partition: int = 0, *, times: int = 1) -> None:
        """As `LocalCluster.force_next_lock_failure`."""
        self._call(self._cluster.force_next_lock_failure, partition, times=times)

    def lose_next_acknowledgement(self, partition: int = 0, *, times: int = 1) -> None:
        """As `LocalCluster.lose_next_acknowledgement`."""
        self._call(self._cluster.lose_next_acknowledgement, partition, times=times)

    def suspend_feed(self) -> None:
        """As `LocalCluster.suspend_feed`."""
        self._call(self._cluster.suspend_feed)

    def resume_feed(self) -> None:
        """As `LocalCluster.resume_feed`."""
        self._call(self._cluster.resume_feed)

    def break_connections(self, partition: int | None = None) -> None:
        """As `LocalCluster.break_connections`."""
        self._call(self._cluster.break_connections, partition)

    def pause_storage(self, number: int) -> None:
        """As `LocalCluster.pause_storage`."""
        self._call(self._cluster.pause_storage, number)

    def resume_storage(self, number: int) -> None:
        """As `LocalCluster.resume_storage`."""
        self._call(self._cluster.resume_storage, number)

    @property
    def server_names(self) -> tuple[str, ...]:
        """As `LocalCluster.server_names`."""
        return self._cluster.server_names

    def is_alive(self, name: str) -> bool:
        """As `LocalCluster.is_alive`."""
        return self._call(self._cluster.is_alive, name)

    def kill_owner(self, partition: int = 0) -> str:
        """As `LocalCluster.kill_owner`."""
        return self._wait_for(self._cluster.kill_owner, partition)

    def kill_server(self, name: str) -> None:
        """As `LocalCluster.kill_server`."""
        self._wait_for(self._cluster.kill_server, name)

    def stop_server(self, name: str) -> None:
        """As `LocalCluster.stop_server`."""
        self._wait_for(self._cluster.stop_server, name)

    def rescue(self, partition: int = 0, mark: int = -1) -> UUID:
        """As `LocalCluster.rescue`."""
        return self._wait_for(self._cluster.rescue, partition, mark)

    def start_server(self, name: str) -> None:
        """As `LocalCluster.start_server`."""
        self._wait_for(self._cluster.start_server, name)

"""`BlockingCluster`: a `LocalCluster` for tests without an event loop, on the thread of the blocking clients.

A test of a synchronous application (Flask, Django, Starlette's `TestClient`) starts a cluster, gives its address to the
application, and asks the cluster what the log holds, without a line of asyncio."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

from waltzd.client.blocking import BlockingClient, blocking, loop_thread
from waltzd.client.client import Client
from waltzd.client.routes import Connect
from waltzd.client.view import E, Serializer, View
from waltzd.testing.cluster import LocalCluster


class BlockingCluster:
    """`LocalCluster` for tests without an event loop: the same calls, and each blocks. Any thread may call them.

    Arguments, results and errors of each method are those of the method of `LocalCluster` with the same name. With
    pytest, the fixture `blocking_waltz_cluster` is a cluster that runs; the mark `waltz` sets its size.

    Example:
        ```python
        with BlockingCluster() as cluster, cluster.client() as client:
            cluster.kill_owner(0)
            assert client.append(b"hello", partition=0).id == 0
        ```
    """

    def __init__(self, **size: Any) -> None:
        """Arguments and errors are those of `LocalCluster`."""
        self._inner = LocalCluster(**size)
        self._thread = loop_thread()

    # -- life

    start = blocking(LocalCluster.start)
    """Start everything, and wait until every partition takes transactions; see `LocalCluster.start`."""
    close = blocking(LocalCluster.close)
    """Close in order; see `LocalCluster.close`."""
    wait_until_ready = blocking(LocalCluster.wait_until_ready)
    """Wait until `is_ready`; see `LocalCluster.wait_until_ready`."""

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # -- for applications

    @property
    def servers(self) -> tuple[str, ...]:
        """Addresses of all servers; only `connect` understands them."""
        return self._inner.servers

    @property
    def connect(self) -> Connect:
        """Value for the argument `connect` of a `Client` or a `BlockingClient`, on any event loop."""
        return self._inner.connect

    def client(
        self,
        *,
        name: str | None = None,
        view: View[E] | None = None,
        serializer: Serializer[E] | None = None,
        **settings: Any,
    ) -> BlockingClient[E]:
        """Return a `BlockingClient` of this cluster, with the keyword arguments of `BlockingClient`; use it with
        `with`. `name` is that of `LocalCluster.client`."""
        connect = self._inner.connect_as(name)
        return BlockingClient(self.servers, connect=connect, view=view, serializer=serializer, **settings)

    def asyncio_client(
        self,
        *,
        name: str | None = None,
        view: View[E] | None = None,
        serializer: Serializer[E] | None = None,
        **settings: Any,
    ) -> Client[E]:
        """Return a `Client` of this cluster, for an application that runs an event loop of its own."""
        return self._inner.client(name=name, view=view, serializer=serializer, **settings)

    set_policy = blocking(LocalCluster.set_policy)
    """Set the grants of the policy; see `LocalCluster.set_policy`."""
    set_channels = blocking(LocalCluster.set_channels)
    """Set the channels; see `LocalCluster.set_channels`."""
    log = blocking(LocalCluster.log)
    """Return every committed transaction of a partition, as records; see `LocalCluster.log`."""
    owner = blocking(LocalCluster.owner)
    """Return the name of the server that has the partition open; see `LocalCluster.owner`."""
    end_position = blocking(LocalCluster.end_position)
    """Return the highest committed id of a partition, -1 if it is empty; see `LocalCluster.end_position`."""
    set_time = blocking(LocalCluster.set_time)
    """Stop the clocks of all servers at a time; see `LocalCluster.set_time`."""

    # -- faults

    force_next_lock_failure = blocking(LocalCluster.force_next_lock_failure)
    """Reject the next `times` transactions with a READ or WRITE lock, as if their client was too far behind; see
    `LocalCluster.force_next_lock_failure`."""
    lose_next_acknowledgement = blocking(LocalCluster.lose_next_acknowledgement)
    """Break the connection before the next `times` outcomes; see `LocalCluster.lose_next_acknowledgement`."""
    suspend_feed = blocking(LocalCluster.suspend_feed)
    """Stop feeding views; see `LocalCluster.suspend_feed`."""
    resume_feed = blocking(LocalCluster.resume_feed)
    """Continue to feed views, from where the feed stopped; see `LocalCluster.resume_feed`."""
    break_connections = blocking(LocalCluster.break_connections)
    """Break the mounts of all clients of the partition, or of all partitions, with everything that is in flight; see
    `LocalCluster.break_connections`."""
    pause_storage = blocking(LocalCluster.pause_storage)
    """Pause the storage with this number, from 0 on; see `LocalCluster.pause_storage`."""
    resume_storage = blocking(LocalCluster.resume_storage)
    """Resume a storage; see `LocalCluster.resume_storage`."""

    @property
    def server_names(self) -> tuple[str, ...]:
        """Names of all servers, whether they run or not."""
        return self._inner.server_names

    is_alive = blocking(LocalCluster.is_alive)
    """Return whether a server runs; see `LocalCluster.is_alive`."""
    kill_owner = blocking(LocalCluster.kill_owner)
    """Kill the server that owns the partition (see `kill_server`); see `LocalCluster.kill_owner`."""
    kill_server = blocking(LocalCluster.kill_server)
    """Kill a server; see `LocalCluster.kill_server`."""
    stop_server = blocking(LocalCluster.stop_server)
    """Stop a server; see `LocalCluster.stop_server`."""
    rescue = blocking(LocalCluster.rescue)
    """End the log of a partition after an id, although more was acknowledged, and continue it on another timeline; see
    `LocalCluster.rescue`."""
    start_server = blocking(LocalCluster.start_server)
    """Start a server that was killed or stopped; see `LocalCluster.start_server`."""

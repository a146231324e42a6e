"""The coordinator over ZooKeeper: an asynchronous interface to kazoo, which runs on threads of its own.

All state here belongs to the event loop; kazoo's threads only pass results and events to it. Two things are not left to
kazoo. Contact: no call is passed to kazoo without contact, because kazoo would send it when contact returns, long after
the call timed out. Watches: ZooKeeper drops them with the connection, so a task that waits for a change reads again
whenever contact returns, and compares.

Kazoo's thread sends heartbeats even if the event loop hangs: the process would keep its ephemeral nodes and do nothing.
So the loop of a daemon sets a beat, and without it the thread sends nothing and does not connect (`LoopBeat`). The
coordinator session then expires, and other servers take over.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from kazoo import exceptions as kazoo_errors
from kazoo.client import KazooClient
from kazoo.handlers.threading import SequentialThreadingHandler
from kazoo.interfaces import IAsyncResult
from kazoo.protocol.states import EventType, KazooState, WatchedEvent, ZnodeStat
from kazoo.security import ACL, OPEN_ACL_UNSAFE, Id, Permissions

from waltzd.cluster.coordinator import Change, Check, Create, Delete, Node, Set, Watchers, check_size
from waltzd.cluster.zookeeper_credentials import NO_CREDENTIALS, UNREAD, CoordinatorTls, ZooKeeperCredentials, digest_of
from waltzd.errors import BadArgument, CannotConnect, WaltzError
from waltzd.errors.operations import ChangedMeanwhile, CoordinatorRefused, NodeExists, NodeMissing

CALL_SECONDS = 10.0
RECONNECT_SECONDS_MAX = 1.0
RESTART_SECONDS = 1.0
LATE_SHARE = 1 / 3
"""Share of the session time-out for which the event loop may hang. The session then ends after four thirds of the time-out
at the latest, and a shorter hang has no effect."""
BEATS = 4
"""Beats of the loop in the time of `LATE_SHARE`."""
log = logging.getLogger("waltz.zookeeper")
_KAZOO_LOG = logging.getLogger("waltz.zookeeper.kazoo")
"""Logger of kazoo, which reports every attempt to connect. This module logs a lost contact once, and its return."""

_UNANSWERED = (
    kazoo_errors.ConnectionLoss,
    kazoo_errors.ConnectionClosedError,
    kazoo_errors.SessionExpiredError,
    kazoo_errors.SessionMovedError,
    kazoo_errors.OperationTimeoutError,
    kazoo_errors.RequestTimeoutError,
    kazoo_errors.ThrottledOpError,
)
"""Errors of kazoo after which the outcome of a call is unknown."""


class LoopBeat:
    """A heartbeat of an event loop, checked by threads that act for it."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`seconds`: the loop is late if its last beat is older. `clock`: called on any thread."""
        self._seconds = seconds
        self._clock = clock
        self._at: float | None = None
        """Time of the last beat; None while beats are not checked."""
        self._timer: asyncio.TimerHandle | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._at = self._clock()
        self._timer = loop.call_later(self._seconds / BEATS, self.start, loop)

    def stop(self) -> None:
        """Stop the beats; the loop counts as alive from now on."""
        if self._timer is not None:
            self._timer.cancel()
        self._at = self._timer = None

    def check(self) -> None:
        """Raise OSError if the loop is late; kazoo handles it as a lost connection."""
        at = self._at
        if at is not None and (late := self._clock() - at) > self._seconds:
            raise OSError(f"the event loop has stood still for {late:.1f} seconds; {self._seconds:.1f} are allowed")


class _RequestCount:
    """Pair of sockets with which kazoo counts its requests: it writes a byte for each, and reads one when it was sent.

    At most one byte is in the pair, because a full pair would block the caller, which is the event loop. Kazoo's thread
    does not connect and reads nothing while the loop is late, so that would be a deadlock."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._lock = threading.Lock()
        self._count = 0
        """Requests in the pair. Invariant: a byte is in the pair if this is not 0."""

    def fileno(self) -> int:
        return self._reader.fileno()

    def send(self, data: bytes) -> int:
        with self._lock:
            if self._count == 0:
                self._writer.send(b"\0")
            self._count += len(data)
        return len(data)

    def recv(self, _: int) -> bytes:
        """Decrement the count. Kazoo calls it only after `select` found a request."""
        with self._lock:
            self._count -= 1
            return self._reader.recv(1) if self._count == 0 else b"\0"

    def close(self) -> None:
        with self._lock:
            self._count = 0  # so that the next `send` fails, and kazoo notices
            self._reader.close()
            self._writer.close()


class _Threads(SequentialThreadingHandler):  # type: ignore[misc]
    """Kazoo's threads and connections. Calls `ended` when one of the threads has ended.

    A ZooKeeper that has lost data closes the connection of every client that has seen newer transactions, without an answer
    and for ever. So kazoo's last seen transaction id is reset (`forget`) after `session_seconds` of connections without an
    answer. The session itself continues if ZooKeeper still has it.

    TLS connections are made here for two reasons: kazoo trusts the authorities of the machine as well as the configured
    ones, and it waits for the socket to be readable while an answer is already decrypted in memory."""

    def __init__(
        self,
        tls: CoordinatorTls | None,
        beat: LoopBeat,
        *,
        ended: Callable[[], None],
        forget: Callable[[], None],
        session_seconds: float,
    ) -> None:
        super().__init__()
        self._tls = tls
        self._beat = beat
        self._ended = ended
        self._forget = forget
        self._session_seconds = session_seconds
        self._refused_since: float | None = None
        """Time of the first connection without an answer since the last session was established (`time.monotonic`)."""
        self.trouble = ""
        """Reason why the last connection failed; empty if it did not."""

    def on_session(self) -> None:
        """Reset the count of refused connections. Called on a thread of kazoo when ZooKeeper has answered."""
        self._refused_since = None

    def create_connection(self, address: tuple[str, int], hostname: str, timeout: float, **_: object) -> socket.socket:
        plain: socket.socket | None = None
        try:
            self._beat.check()
            plain = socket.create_connection(address, timeout)
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            made = plain if self._tls is None else self._tls.context().wrap_socket(plain, server_hostname=hostname)
        except (OSError, ValueError) as error:
            self.trouble = getattr(error, "verify_message", "") or getattr(error, "strerror", "") or str(error)
            if plain is not None:
                plain.close()
            raise OSError(self.trouble) from error  # kazoo retries after an OSError
        self.trouble = ""
        now = time.monotonic()
        if self._refused_since is None:
            self._refused_since = now
        elif now - self._refused_since > self._session_seconds:
            self._refused_since = now
            self._forget()  # before kazoo sends its last seen transaction id on this connection
        return made

    def create_socket_pair(self) -> tuple[_RequestCount, _RequestCount]:
        count = _RequestCount()
        return count, count

    def select(self, readers: Sequence[Any], writers: Sequence[Any], others: Sequence[Any], timeout: float | None) -> Any:
        """Wait for sockets. Kazoo calls it before each read and write, so a late loop stops both."""
        ready = [one for one in readers if isinstance(one, ssl.SSLSocket) and one.pending() > 0]
        if not ready:
            every = super().select(readers, writers, others, timeout)
            self._beat.check()
            return every
        self._beat.check()
        found, *rest = super().select(readers, writers, others, 0)
        return [*found, *(one for one in ready if one not in found)], *rest

    def spawn(self, func: Callable[..., object], *args: object, **kwargs: object) -> object:
        def until_the_end() -> None:
            try:
                func(*args, **kwargs)
            finally:
                self._ended()

        return super().spawn(until_the_end)


class ZooKeeperCoordinator:
    """A coordinator session over ZooKeeper.

    `hosts` is like "one:2181,two:2181"; `root` is like "/waltz/payments", the parent of all nodes of the cluster. ZooKeeper
    expires the session after `session_seconds` without a heartbeat."""

    def __init__(
        self,
        hosts: str,
        root: str,
        access: ZooKeeperCredentials = NO_CREDENTIALS,
        *,
        session_seconds: float = 6.0,
        call_seconds: float = CALL_SECONDS,
        needs_loop: bool = False,
    ) -> None:
        """`needs_loop`: let the session expire when the event loop hangs, as daemons need it."""
        if not root.startswith("/") or any(part in ("", ".", "..") for part in root[1:].split("/")):
            raise BadArgument(f"{root!r} is not a path for a cluster: write it like /waltz/payments")
        self.hosts, self.root, self._access = hosts, root, access
        self._session_seconds, self._call_seconds = session_seconds, call_seconds
        self._session, self._session_id = 0, 0
        self._contact = asyncio.Event()
        self._is_closed = False
        self._watchers = Watchers()
        self.on_change = self._watchers.on_change
        self._watched: dict[str, asyncio.Task[object]] = {}
        """State of each node since when its watches are set, by its path. Removed when a watch fires, and when contact is
        lost or returns. A task that waits for its change takes it from here: many partitions wait for the same nodes."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._beat = LoopBeat(session_seconds * LATE_SHARE)
        self._needs_loop = needs_loop
        self._client = self._make_client()

    def _make_client(self) -> KazooClient:
        if _KAZOO_LOG.level == logging.NOTSET:
            _KAZOO_LOG.setLevel(logging.ERROR)
        wrong = f"{self.hosts!r} is not a list of ZooKeeper addresses: write them like one:2181,two:2181"
        if "/" in self.hosts:
            raise BadArgument(wrong)
        threads = self._threads = _Threads(
            self._access.tls,
            self._beat,
            ended=lambda: self._tell(self._on_end, client),
            forget=lambda: self._forget(client),
            session_seconds=self._session_seconds,
        )
        try:
            client = KazooClient(
                self.hosts,
                timeout=self._session_seconds,
                handler=threads,
                auth_data=[("digest", one) for one in self._access.credentials],
                connection_retry={"max_tries": -1, "delay": 0.1, "max_delay": RECONNECT_SECONDS_MAX},
                logger=_KAZOO_LOG,
            )
        except ValueError as error:
            raise BadArgument(wrong) from error

        def hand_over(state: str) -> None:
            """Pass a state of kazoo to the loop. Called on a thread of kazoo."""
            if state == KazooState.CONNECTED:
                threads.on_session()
            self._tell(self._on_state, client, state, client.client_id)

        client.add_listener(hand_over)
        return client

    def _forget(self, client: KazooClient) -> None:
        """Reset the last seen transaction id of kazoo, on its thread, to accept a ZooKeeper that has lost data.

        Later reads may return older states. That is safe: every change is conditional on the version that was read."""
        if not client.last_zxid:
            return
        log.warning(
            "ZooKeeper at %s accepts connections and has given no session for %g seconds; it does so when it has lost data "
            "that this process has seen (up to its transaction %#x). From now on what was seen is not held against it: "
            "the session goes on if ZooKeeper still has it, otherwise a new one begins",
            self.hosts,
            self._session_seconds,
            client.last_zxid,
        )
        client.last_zxid = 0

    async def start(self) -> None:
        """Connect, or raise within the deadline of a call."""
        self._loop = asyncio.get_running_loop()
        if self._needs_loop:
            self._beat.start(self._loop)
        self._client.start_async()
        try:
            async with asyncio.timeout(self._call_seconds):
                await self._contact.wait()
        except TimeoutError:
            await self.close()
            raise self._silence() from None

    def _silence(self) -> CannotConnect:
        """Return the error for a ZooKeeper that never answered."""
        trouble = f": {self._threads.trouble}" if self._threads.trouble else ""
        speaks = "in plain text" if self._access.tls is None else "with TLS"
        return CannotConnect(
            f"no ZooKeeper answers at {self.hosts} {speaks} within {self._call_seconds:g} seconds{trouble}",
            not_done="nothing was read or changed",
            next_step="check that ZooKeeper runs there, that its address is right, and that this port of it "
            + ("has no TLS" if self._access.tls is None else "has TLS, with a certificate for that host by your authority"),
        )

    # -- events of kazoo -----------------------------------------------------------------------------------------------

    def _tell(self, function: Callable[..., None], *arguments: object) -> None:
        """Call a function on the loop, from a thread of kazoo."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the loop was closed, and all listeners with it
            return

    def _on_state(self, client: KazooClient, state: str, session_id: tuple[int, bytes] | None) -> None:
        if client is not self._client or self._is_closed:
            return
        self._watched.clear()
        if state == KazooState.CONNECTED and session_id is not None:
            if session_id[0] != self._session_id:
                self._session_id = session_id[0]
                self._session += 1
            self._contact.set()
            log.info("in contact with ZooKeeper at %s, coordinator session %d", self.hosts, self._session)
            self._watchers.wake()
        elif self._contact.is_set():
            self._contact.clear()
            log.warning("lost contact with ZooKeeper at %s", self.hosts)
        else:
            return
        self._watchers.tell()

    def _on_end(self, client: KazooClient) -> None:
        """Restart the client: kazoo's thread has ended after an unexpected error."""
        if client is self._client and not self._is_closed:
            assert self._loop is not None
            log.error("the ZooKeeper client ended by itself; a new one starts in %g seconds", RESTART_SECONDS)
            self._loop.call_later(RESTART_SECONDS, self._restart, client)

    def _restart(self, client: KazooClient) -> None:
        if client is not self._client or self._is_closed:
            return
        threading.Thread(target=_end, args=(client,), name="zookeeper-end", daemon=True).start()
        self._watched.clear()
        self._client = self._make_client()
        self._client.start_async()

    def _on_event(self, event: WatchedEvent) -> None:
        """Handle a watch, on a thread of kazoo. Its type is NONE when kazoo drops its watches because contact is lost."""
        if event.type != EventType.NONE:
            self._tell(self._on_node_change, event.path)

    def _on_node_change(self, path: str) -> None:
        self._watched.pop(path, None)
        self._watchers.wake((path,))

    # -- calls ---------------------------------------------------------------------------------------------------------

    async def _call(self, path: str, ask: Callable[[KazooClient], IAsyncResult]) -> Any:
        """Make a call as soon as there is contact; return its answer, or raise a `WaltzError` within the deadline."""
        if self._is_closed or self._loop is None:
            raise CannotConnect("the connection to ZooKeeper is closed")
        try:
            async with asyncio.timeout(self._call_seconds):
                await self._contact.wait()
                answer: asyncio.Future[Any] = self._loop.create_future()
                ask(self._client).rawlink(lambda result: self._tell(_settle, answer, result))
                return await answer
        except TimeoutError:
            raise CannotConnect(
                f"ZooKeeper at {self.hosts} did not answer within {self._call_seconds:g} seconds ({path})"
            ) from None
        except _UNANSWERED as error:
            raise CannotConnect(f"contact with ZooKeeper at {self.hosts} was lost ({path})") from error
        except kazoo_errors.KazooException as error:
            raise _refusal(path, error) from error

    def _full(self, path: str) -> str:
        return self.root if path == "/" else self.root + path

    async def get(self, path: str) -> Node | None:
        try:
            data, stat = await self._call(path, lambda client: client.get_async(self._full(path)))
        except NodeMissing:
            return None
        return Node(data, stat.version, stat.czxid, stat.ephemeralOwner == self._session_id)

    async def children(self, path: str) -> list[str]:
        try:
            return sorted(await self._call(path, lambda client: client.get_children_async(self._full(path))))
        except NodeMissing:
            return []

    async def commit(self, changes: Sequence[Change]) -> None:
        check_size(changes)
        if any(isinstance(change, Create) and change.path == "/" for change in changes):
            await self._make_way()
        paths = ", ".join(change.path for change in changes[:3])
        acl = await self._acl(changes)
        results = await self._call(paths, lambda client: self._transaction(client, changes, acl))
        for change, result in zip(changes, results, strict=True):
            if isinstance(result, Exception) and not isinstance(result, _BESIDE):
                raise _refusal(change.path, result) from result

    async def _make_way(self) -> None:
        """Create the nodes above the root, which belong to no cluster."""
        above = self.root.rpartition("/")[0]
        if above:
            await self._call(above, lambda client: client.ensure_path_async(above))

    async def _acl(self, changes: Sequence[Change]) -> list[ACL]:
        """Return the ACL of created nodes: that of the root.

        While an operator gives credentials to the processes of an open cluster, those without them still have to read all
        nodes."""
        created = [change.path for change in changes if isinstance(change, Create)]
        if not created or not self._access.has_credentials:
            return list(OPEN_ACL_UNSAFE)
        if "/" in created:
            return self._closed("/")
        found = await self._acl_of("/")
        return list(OPEN_ACL_UNSAFE) if _is_open(found) else found

    def _closed(self, path: str) -> list[ACL]:
        """Return the ACL of a node that belongs to our credentials."""
        owner = ACL(Permissions.ALL, Id("digest", self._access.owner))
        readers = [ACL(Permissions.READ, Id("digest", digest_of(one))) for one in self._access.readers]
        return _without_readers([owner, *readers], path)

    def _transaction(self, client: KazooClient, changes: Sequence[Change], acl: list[ACL]) -> IAsyncResult:
        transaction = client.transaction()
        for change in changes:
            path = self._full(change.path)
            match change:
                case Create(data=data, ephemeral=ephemeral):
                    transaction.create(path, data, _without_readers(acl, change.path), ephemeral=ephemeral)
                case Set(data=data, version=version):
                    transaction.set_data(path, data, version)
                case Delete(version=version):
                    transaction.delete(path, version)
                case Check(version=version):
                    transaction.check(path, version)
        return transaction.commit_async()

    # -- access control ------------------------------------------------------------------------------------------------

    @property
    def has_credentials(self) -> bool:
        return self._access.has_credentials

    async def is_open(self, path: str) -> bool:
        try:
            return _is_open(await self._acl_of(path))
        except CoordinatorRefused:  # its ACL permits nobody to read it, not even this process
            return False

    async def is_ours(self, path: str) -> bool:
        found = await self._acl_of(path)
        return not found or set(found) == set(self._closed(path))

    async def _acl_of(self, path: str) -> list[ACL]:
        try:
            acl, _ = await self._call(path, lambda client: client.get_acls_async(self._full(path)))
        except NodeMissing:
            return []
        return list(acl)

    async def protect(self, path: str) -> None:
        assert self._access.has_credentials
        await self._call(path, lambda client: client.set_acls_async(self._full(path), self._closed(path)))

    async def open_above(self) -> list[str]:
        """Return nodes outside of the root in which any process may create nodes: ZooKeeper holds all nodes in memory."""
        parts = self.root.split("/")[1:-1]
        above = ["/", *("/" + "/".join(parts[: count + 1]) for count in range(len(parts))), *_SYSTEM]
        former = [Id("digest", name) for name in self._access.names[1:]]
        found = []
        for path in above:
            with suppress(NodeMissing):
                acl, _ = await self._call(path, partial(KazooClient.get_acls_async, path=path))
                for_all = [one for one in acl if one.id.scheme == "world" and one.perms & ~Permissions.READ]
                if for_all or any(one.id in former for one in acl):
                    found.append(path)
        return found

    async def close_above(self) -> list[str]:
        assert self._access.has_credentials
        await self._make_way()
        owner = ACL(Permissions.ALL, Id("digest", self._access.owner))
        ours = [owner, ACL(Permissions.READ, Id("world", "anyone"))]
        closed = []
        for path in await self.open_above():
            with suppress(CoordinatorRefused):  # the operator of ZooKeeper decides; `open_above` keeps returning it
                await self._call(path, partial(KazooClient.set_acls_async, path=path, acls=ours))
                closed.append(path)
        return closed

    # -- changes -------------------------------------------------------------------------------------------------------

    @property
    def is_connected(self) -> bool:
        return self._contact.is_set()

    @property
    def session(self) -> int:
        return self._session

    async def wait_for_change(self, paths: Sequence[str], seen: object | None) -> object:
        with self._watchers.waiter([self._full(path) for path in paths]) as woken:
            while True:
                woken.clear()
                try:
                    token = self._session, tuple([await self._look(self._full(path)) for path in paths])
                except CannotConnect:
                    if seen is None or self._is_closed:
                        raise
                    if self.is_connected:
                        continue
                else:
                    if token != seen:
                        return token
                await woken.wait()

    async def _look(self, path: str) -> object:
        """Return the state of a node since its watches were set; set them if they are not.

        The state may be older than what a read finds, but then a watch fires that wakes the waiting task."""
        task = self._watched.get(path)
        if task is None:
            assert self._loop is not None
            task = self._watched[path] = self._loop.create_task(self._set_watches(path))
            task.add_done_callback(partial(self._forget_failed, path))
        return await asyncio.shield(task)  # shielded, because other callers may wait for the same task

    def _forget_failed(self, path: str, task: asyncio.Task[object]) -> None:
        if (task.cancelled() or task.exception() is not None) and self._watched.get(path) is task:
            del self._watched[path]

    async def _set_watches(self, path: str) -> object:
        """Return the state of a node, and set watches for all changes to it.

        Each half of the state comes from the call that set its watch, so every later change wakes the waiting task."""
        try:
            stat: ZnodeStat | None = await self._call(path, lambda client: client.exists_async(path, self._on_event))
            if stat is None:
                return path, None
            _, below = await self._call(
                path, lambda client: client.get_children_async(path, self._on_event, include_data=True)
            )
        except NodeMissing:  # it was deleted between the two calls, and the first watch has fired
            return path, None
        return path, (stat.czxid, stat.mzxid, below.pzxid)

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed, had_contact = True, self._contact.is_set()
        self._contact.clear()
        self._watched.clear()
        self._watchers.wake()
        self._beat.stop()
        if self._loop is None:
            return
        ended = asyncio.Event()

        def end() -> None:
            _end(self._client)
            self._tell(ended.set)

        # Stopping kazoo blocks until ZooKeeper has answered. A daemon thread does not keep the program from ending.
        threading.Thread(target=end, name="zookeeper-end", daemon=True).start()
        if not had_contact:
            return
        try:
            async with asyncio.timeout(self._call_seconds):
                await ended.wait()
        except TimeoutError:
            log.warning("ZooKeeper does not answer; it will end the coordinator session by itself")


_SYSTEM = ("/zookeeper", "/zookeeper/quota")
"""Nodes that every ZooKeeper has, open to all processes until an operator closes them."""
_BESIDE = (kazoo_errors.RolledBackError, kazoo_errors.RuntimeInconsistency)
"""Errors that a transaction reports for the changes beside the one that failed."""


def _is_open(acl: Sequence[ACL]) -> bool:
    return any(one.id.scheme in ("world", "ip") for one in acl)


def _without_readers(acl: list[ACL], path: str) -> list[ACL]:
    """Return the ACL of a node, given that of the root: read-only names cannot read `UNREAD`."""
    return [one for one in acl if one.perms != Permissions.READ] if path == UNREAD else acl


def _settle(answer: asyncio.Future[Any], result: IAsyncResult) -> None:
    """Set the result of a call, unless it has timed out."""
    if answer.done():
        return
    error = result.exception
    if error is None:
        answer.set_result(result.value)
    elif isinstance(error, kazoo_errors.KazooException):
        answer.set_exception(error)
    else:
        answer.set_exception(CannotConnect(f"an answer of ZooKeeper cannot be understood: {error!r}"))


def _end(client: KazooClient) -> None:
    """End the coordinator session and free the resources of kazoo. Blocks."""
    try:
        client.stop()
        client.close()
    except (kazoo_errors.WriterNotClosedException, OSError) as error:
        log.warning("the ZooKeeper client did not end: %s", error)


def _refusal(path: str, error: Exception) -> WaltzError:
    """Convert an error of ZooKeeper to a `WaltzError`."""
    match error:
        case kazoo_errors.BadVersionError():
            return ChangedMeanwhile(f"{path} was changed by another process", path=path)
        case kazoo_errors.NotEmptyError():
            return ChangedMeanwhile(f"{path} has nodes below it", path=path)
        case kazoo_errors.NodeExistsError():
            return NodeExists(f"the coordinator has a node {path} already", path=path)
        case kazoo_errors.NoNodeError():
            return NodeMissing(f"the coordinator has no node {path}, or none to create it in", path=path)
        case kazoo_errors.NoAuthError():
            return CoordinatorRefused(
                f"ZooKeeper does not let this process near {path}: the node belongs to others, by its ACL",
                next_step="give the credentials of the cluster: coordinator_credentials of a server, "
                "--coordinator-credentials of waltzctl; to look, those that only read are enough",
                path=path,
            )
        case _:
            return CoordinatorRefused(f"ZooKeeper refuses {path}: {type(error).__name__}", path=path)

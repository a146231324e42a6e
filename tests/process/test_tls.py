"""Mutual TLS between real processes: who gets in, who may call what, and certificates that are replaced while they run."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import grpc
import grpc.aio
import pytest

from tests.process.certificates import Authority, Files, mistakable
from tests.process.daemon import KEY, OWNER_KEY, PARTITIONS, Daemon
from tests.process.test_storage import append, runs_of
from waltzctl.config.configuration import verdict_of
from waltzd.client import loop
from waltzd.errors import CannotConnect, NoSuchPartition, NotPermitted, WaltzError
from waltzd.errors.operations import WrongPeer
from waltzd.protocol.address import Address
from waltzd.protocol.batches import Credit
from waltzd.protocol.locks import MarkedPage, MarkedQuery
from waltzd.protocol.positions import Position
from waltzd.protocol.role import Identity, Role
from waltzd.server.clients.stream_port import StreamPort
from waltzd.wire import wire_pb2 as wire
from waltzd.wire.calls import CALLS, DESCRIBE_STORAGE, FETCH_MARKED
from waltzd.wire.codec import unpacked_error
from waltzd.wire.frames import HEAD, Kind
from waltzd.wire.grpc import Channel, error_of
from waltzd.wire.listener import create_server, listen
from waltzd.wire.servers import ServerAdminClient, ServerClient
from waltzd.wire.storages import AdminClient, AppendStream, ReplicaClient
from waltzd.wire.streams import Hello
from waltzd.wire.tls import Tls

MakeDaemon = Callable[..., Daemon]
OTHER = UUID(int=7)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ca")


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Authority, Daemon]]:
    """An authority, and a storage without partitions that has a certificate of it, for tests that change neither."""
    home = tmp_path_factory.mktemp("signed")
    authority = Authority(home / "ca")
    settings: dict[str, Any] = authority.issue(KEY, Role.STORAGE, "s1").settings
    with Daemon(home / "storage", **settings) as daemon:
        yield authority, daemon


def secured(make_daemon: MakeDaemon, authority: Authority, **settings: object) -> tuple[Daemon, Files]:
    files = authority.issue(KEY, Role.STORAGE, "s1")
    return make_daemon(**files.settings, **settings).start(), files


def replicas(daemon: Daemon, files: Files, role: Role = Role.SERVER, name: str | None = None) -> ReplicaClient:
    return ReplicaClient(daemon.listen, KEY, seconds=30, tls=files.tls(role), name=name, owner_key=OWNER_KEY)


def admin(daemon: Daemon, files: Files, role: Role = Role.OPERATOR) -> AdminClient:
    return AdminClient(daemon.admin_listen, KEY, seconds=30, tls=files.tls(role))


def test_a_server_and_an_operator_do_their_work(make_daemon: MakeDaemon, authority: Authority) -> None:
    daemon, _ = secured(make_daemon, authority)
    server, operator = authority.issue(KEY, Role.SERVER, "one"), authority.issue(KEY, Role.OPERATOR, "ann")

    async def work() -> None:
        async with replicas(daemon, server, name="s1") as owner, admin(daemon, operator) as tool:
            assert await tool.create_partitions([0]) == {0: None}
            await owner.open(0, 1, partitions=PARTITIONS)
            await owner.set_low_mark(0, 1, -1)
            await append(owner.append(0, 1), runs_of(5), 29)
            await append(owner.append(0, 1), runs_of(1, first_id=50), 29)
            async with replicas(daemon, operator, Role.OPERATOR) as reader:
                assert [run.last_id async for run in reader.read(0, 0)] == [29]
                with pytest.raises(NotPermitted):
                    [run async for run in reader.read(0, 0, session=1)]
                with pytest.raises(NotPermitted):
                    await reader.segments(0, session=1)
                with pytest.raises(NotPermitted):
                    await reader.open(0, 2, partitions=PARTITIONS)

    loop.run(work())


def test_strangers_do_not_get_through_the_handshake(signed: tuple[Authority, Daemon], tmp_path: Path) -> None:
    authority, daemon = signed
    stranger = Authority(tmp_path / "stranger").issue(KEY, Role.SERVER, "one")
    expired = authority.issue(KEY, Role.SERVER, "old", expired=True)
    options = [("grpc.ssl_target_name_override", f"storage.{KEY}.waltz")]
    ca = authority.ca.read_bytes()

    def credentials(files: Files | None) -> grpc.ChannelCredentials:
        if files is None:
            return grpc.ssl_channel_credentials(ca)
        return grpc.ssl_channel_credentials(ca, files.key.read_bytes(), files.certificate.read_bytes())

    async def knock(channel: grpc.aio.Channel) -> grpc.StatusCode:
        try:
            describe: Any = channel.unary_unary(DESCRIBE_STORAGE.path)
            await describe(b"", timeout=30)
        except grpc.aio.AioRpcError as error:
            return error.code()
        finally:
            await channel.close()
        return grpc.StatusCode.OK

    async def knock_all() -> None:
        address = daemon.admin_listen
        refused = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
        assert await knock(grpc.aio.insecure_channel(address)) in refused, "plain text"
        for files in (None, stranger, expired):
            assert await knock(grpc.aio.secure_channel(address, credentials(files), options=options)) in refused
        good = authority.issue(KEY, Role.OPERATOR, "ann")
        assert await knock(grpc.aio.secure_channel(address, credentials(good), options=options)) == grpc.StatusCode.OK

    loop.run(knock_all())


def test_only_servers_of_the_cluster_append(signed: tuple[Authority, Daemon], tmp_path: Path) -> None:
    authority, daemon = signed
    host, _, port = daemon.stream_listen.rpartition(":")
    stranger = Authority(tmp_path / "stranger").issue(KEY, Role.SERVER, "one")
    foreign = authority.issue(OTHER, Role.SERVER, "one", file="foreign")
    expected: list[tuple[Tls | None, type[WaltzError]]] = [
        (None, CannotConnect),
        (stranger.tls(Role.SERVER), CannotConnect),
        (foreign.tls(Role.SERVER), CannotConnect),
        (authority.issue(KEY, Role.OPERATOR, "ann").tls(Role.OPERATOR), NotPermitted),
        (authority.issue(KEY, Role.CLIENT, "app").tls(Role.CLIENT), NotPermitted),
        (authority.issue(KEY, Role.SERVER, "one").tls(Role.SERVER), NoSuchPartition),
    ]

    async def knock(tls: Tls | None) -> WaltzError:
        stream = AppendStream(host, int(port), Hello(KEY, 0, 1), tls=tls, name=None)
        try:
            async with asyncio.timeout(10):
                await stream.start()
                if await stream.receive() is None:
                    return CannotConnect("it was closed")
        except WaltzError as error:
            return error
        finally:
            stream.cancel()
        raise AssertionError("it was let in")

    async def check() -> None:
        for tls, error in expected:
            assert type(await knock(tls)) is error

    loop.run(check())


def test_a_caller_talks_only_to_whom_it_means(signed: tuple[Authority, Daemon], tmp_path: Path) -> None:
    """The right authority signed it, and still it is not the storage that was asked for."""
    authority, daemon = signed
    server = authority.issue(KEY, Role.SERVER, "one")
    foreign = authority.issue(OTHER, Role.SERVER, "one", file="foreign")

    async def refused(client: Any, call: Any) -> None:
        try:
            with pytest.raises(CannotConnect):
                await call(client)
        finally:
            await client.close()

    async def check() -> None:
        await refused(replicas(daemon, server, name="s2"), lambda client: client.open(0, 1, partitions=PARTITIONS))
        await refused(replicas(daemon, foreign), lambda client: client.open(0, 1, partitions=PARTITIONS))
        client = authority.issue(KEY, Role.CLIENT, "app").tls(Role.CLIENT)
        await refused(ServerClient(daemon.listen, KEY, seconds=30, tls=client), lambda found: found.locate())

    loop.run(check())


# -- every call by every role ------------------------------------------------------------------------------------------


METHODS = {
    f"/{service.full_name}/{method.name}": method
    for service in wire.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}


class Everything(grpc.GenericRpcHandler):
    """Answers every call that there is. Streams are answered in both ways that our services know."""

    def service(self, handler_call_details: Any) -> Any:
        method = METHODS[handler_call_details.method]

        async def one(request: bytes, context: Any) -> bytes:
            return b"reached"

        async def several(request: bytes, context: Any) -> AsyncIterator[bytes]:
            yield b"reached"

        async def written(request: bytes, context: Any) -> None:
            await context.write(b"reached")

        plain: dict[str, Any] = {"request_deserializer": bytes, "response_serializer": bytes}
        if method.client_streaming and method.server_streaming:
            return grpc.stream_stream_rpc_method_handler(written, **plain)
        if method.client_streaming:
            return grpc.stream_unary_rpc_method_handler(one, **plain)
        if method.server_streaming:
            return grpc.unary_stream_rpc_method_handler(several, **plain)
        return grpc.unary_unary_rpc_method_handler(one, **plain)


async def reach(channel: Any, name: str) -> Any:
    method = METHODS[name]
    try:
        if method.client_streaming and method.server_streaming:
            return await channel.stream_stream(name)(iter([]), timeout=10).read()
        if method.client_streaming:
            return await channel.stream_unary(name)(iter([]), timeout=10)
        if method.server_streaming:
            return await channel.unary_stream(name)(b"", timeout=10).read()
        return await channel.unary_unary(name)(b"", timeout=10)
    except grpc.aio.AioRpcError as error:
        raise error_of(error) from error


async def permitted(files: Files, address: str, server: Files) -> set[str]:
    """The calls that this certificate can make, asked one by one. The caller goes by the server's authority."""
    found: set[str] = set()
    channel = grpc.aio.secure_channel(
        address,
        grpc.ssl_channel_credentials(server.ca.read_bytes(), files.key.read_bytes(), files.certificate.read_bytes()),
        options=[("grpc.ssl_target_name_override", f"server.{KEY}.waltz")],
    )
    try:
        for name in sorted(METHODS):
            try:
                assert await reach(channel, name) == b"reached"
                found.add(name)
            except NotPermitted:
                continue
    finally:
        await channel.close()
    return found


def test_every_call_is_tried_by_every_role(authority: Authority) -> None:
    server = authority.issue(KEY, Role.SERVER, "one")

    async def check() -> None:
        tls = server.tls(Role.SERVER)
        daemon = create_server(1 << 20, tls)
        daemon.add_generic_rpc_handlers((Everything(),))
        address = f"127.0.0.1:{listen(daemon, Address('127.0.0.1', 0), tls)}"
        await daemon.start()
        try:
            for role in Role:
                files = authority.issue(KEY, role, "x")
                assert await permitted(files, address, server) == {n for n, call in CALLS.items() if role in call.roles}
                foreign = authority.issue(OTHER, role, "x", file=f"foreign-{role}")
                assert await permitted(foreign, address, server) == set(), "a certificate of another cluster"
        finally:
            await daemon.stop(0)

    loop.run(check())


def test_calls_over_frames_are_of_the_certificate(authority: Authority) -> None:
    """The same roles are let in as over gRPC, and a call has the identity of its connection."""
    server, callers = authority.issue(KEY, Role.SERVER, "one"), list[str]()

    class Calls:
        async def fetch_marked(self, *_arguments: Any, identity: str, **_options: Any) -> MarkedPage:
            callers.append(identity)
            return MarkedPage(records=(), end=Position(5))

        async def mount(self, link: Any) -> None:
            await link.receive()

    async def check() -> None:
        calls: Any = Calls()
        port = StreamPort(Address("127.0.0.1", 0), 1 << 20, server.tls(Role.SERVER))
        await port.open()
        port.serve(calls, on_fatal=lambda error: None)
        query = MarkedQuery(groups=((1,),), limit=1)
        try:
            for role in Role:
                for key in (KEY, OTHER):
                    tls = authority.issue(key, role, "x", file=f"{role}-{key.int}").tls(role)
                    async with ServerClient("127.0.0.1:1", KEY, tls=tls, seconds=1) as client:
                        client.expect("one", str(port.address))
                        asking = client.fetch_marked(3, query, confirmed=True)
                        if key == KEY and role in FETCH_MARKED.roles:
                            assert (await asking).end == 5
                            assert callers[-1] == Identity(KEY, role, "x").uri
                        else:
                            with pytest.raises(CannotConnect):
                                await asking
        finally:
            await port.stop(0)

    loop.run(check())
    assert len(callers) == len(FETCH_MARKED.roles)


def test_a_certificate_without_an_identity_may_do_nothing(authority: Authority) -> None:
    server = authority.issue(KEY, Role.SERVER, "one")
    nobody = authority.sign([], [f"client.{KEY}.waltz"], file="nobody")

    async def check() -> None:
        tls = server.tls(Role.SERVER)
        daemon = create_server(1 << 20, tls)
        daemon.add_generic_rpc_handlers((Everything(),))
        address = f"127.0.0.1:{listen(daemon, Address('127.0.0.1', 0), tls)}"
        await daemon.start()
        channel = grpc.aio.secure_channel(
            address,
            grpc.ssl_channel_credentials(server.ca.read_bytes(), nobody.key.read_bytes(), nobody.certificate.read_bytes()),
            options=[("grpc.ssl_target_name_override", f"server.{KEY}.waltz")],
        )
        try:
            for name in sorted(METHODS):
                with pytest.raises(NotPermitted):
                    await reach(channel, name)
        finally:
            await channel.close()
            await daemon.stop(0)

    loop.run(check())


@pytest.mark.parametrize("kind", sorted(mistakable("")))
def test_a_text_that_looks_like_an_operator_is_none(signed: tuple[Authority, Daemon], kind: str) -> None:
    """On the ports of gRPC and on that of streams, whatever type of name it stands in."""
    authority, daemon = signed
    ports = ((daemon.admin_listen, Role.OPERATOR), (daemon.stream_listen, Role.SERVER))

    async def check() -> None:
        for address, role in ports:
            eve = authority.sign_names(mistakable(Identity(KEY, role, "eve").uri)[kind], file=f"eve-{role}")
            if role is Role.OPERATOR:
                options = [("grpc.ssl_target_name_override", f"storage.{KEY}.waltz")]
                given = [path.read_bytes() for path in (authority.ca, eve.key, eve.certificate)]
                async with grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(*given), options) as channel:
                    with pytest.raises(NotPermitted):
                        await reach(channel, "/waltz.v1.StorageAdmin/Describe")
                continue
            calling = ssl.create_default_context(cafile=str(authority.ca))
            calling.load_cert_chain(eve.certificate, eve.key)
            reader, writer = await asyncio.open_connection(
                *address.rsplit(":", 1), ssl=calling, server_hostname=f"storage.{KEY}.waltz"
            )
            hello = Hello(KEY, 0, 1).encode()
            writer.write(HEAD.pack(len(hello), Kind.HELLO) + hello)
            answer = await reader.read()
            writer.close()
            assert answer[4] == Kind.REFUSED
            assert isinstance(unpacked_error(answer[5:]), NotPermitted)

    loop.run(check())


@pytest.mark.parametrize("kind", ["a client", "no identity", "a wildcard", "another server", "a storage", "itself"])
def test_only_the_certificate_of_that_server_answers_as_it(authority: Authority, kind: str) -> None:
    """The DNS names of a server do not make one, in no certificate that the authority signed."""
    names = Identity(KEY, Role.SERVER, "one").dns_names
    files = {
        "a client": lambda: authority.sign([Identity(KEY, Role.CLIENT, "eve").uri], names, file="eve"),
        "no identity": lambda: authority.sign([], names, file="eve"),
        "a wildcard": lambda: authority.sign([], [f"*.{KEY}.waltz", f"*.server.{KEY}.waltz"], file="eve"),
        "another server": lambda: authority.sign([Identity(KEY, Role.SERVER, "two").uri], names, file="eve"),
        "a storage": lambda: authority.sign([Identity(KEY, Role.STORAGE, "one").uri], names, file="eve"),
        "itself": lambda: authority.issue(KEY, Role.SERVER, "one"),
    }[kind]()
    asked: list[str] = []

    class Counting(Everything):
        def service(self, handler_call_details: Any) -> Any:
            asked.append(handler_call_details.method)
            return super().service(handler_call_details)

    async def check() -> None:
        daemon = grpc.aio.server()
        daemon.add_generic_rpc_handlers((Counting(),))
        pair = [(files.key.read_bytes(), files.certificate.read_bytes())]
        given = grpc.ssl_server_credentials(pair, authority.ca.read_bytes(), require_client_auth=True)
        address = f"127.0.0.1:{daemon.add_secure_port('127.0.0.1:0', given)}"
        await daemon.start()
        app = authority.issue(KEY, Role.CLIENT, "app").tls(Role.CLIENT)
        operator = authority.issue(KEY, Role.OPERATOR, "ann").tls(Role.OPERATOR)
        client = ServerClient(address, KEY, seconds=30, tls=app)
        client.expect("one")
        try:
            if kind == "itself":
                channel = Channel(address, tls=app, peer=Role.SERVER, name="one")
                await channel.prove(5)
                assert await reach(channel, "/waltz.v1.Log/Locate") == b"reached"
                await channel.close()
                return
            for call in (
                client.locate,
                lambda: client.mount().send([Credit(1)]),
                lambda: anext(client.fetch(0, 0)),
                ServerAdminClient(address, KEY, seconds=30, tls=operator, name="one").describe,
            ):
                with pytest.raises(WrongPeer):
                    await call()
        finally:
            await client.close()
            await daemon.stop(0)
        assert not asked

    loop.run(check())


# -- replaced while they run -------------------------------------------------------------------------------------------


def replace(files: Files, new: Files) -> None:
    """As a tool would: each file whole, under its name at once."""
    for old, other in ((files.certificate, new.certificate), (files.key, new.key)):
        beside = old.with_suffix(".next")
        shutil.copy(other, beside)
        os.replace(beside, old)


def peer_of(address: str, authority: Authority, files: Files) -> int:
    """The serial number of the certificate that is shown there."""
    context = ssl.create_default_context(cafile=str(authority.ca))
    context.load_cert_chain(files.certificate, files.key)
    host, port = address.rsplit(":", 1)
    with (
        socket.create_connection((host, int(port)), timeout=30) as raw,
        context.wrap_socket(raw, server_hostname=f"storage.{KEY}.waltz") as secure,
    ):
        found = secure.getpeercert()
        assert found is not None
        return int(str(found["serialNumber"]), 16)


def test_a_daemon_shows_a_new_certificate_without_a_restart(make_daemon: MakeDaemon, authority: Authority) -> None:
    daemon, files = secured(make_daemon, authority)
    server, ports = authority.issue(KEY, Role.SERVER, "one"), (daemon.listen, daemon.stream_listen)
    before = [peer_of(address, authority, server) for address in ports]
    replace(files, authority.issue(KEY, Role.STORAGE, "s1", file="new"))
    after = [peer_of(address, authority, server) for address in ports]
    assert min(after) > max(before)
    assert "was replaced" in daemon.log
    files.certificate.write_text("garbage")
    assert [peer_of(address, authority, server) for address in ports] == after
    assert "stays in use" in daemon.log


def test_a_caller_goes_on_with_a_daemon_that_came_back_with_another_certificate(
    make_daemon: MakeDaemon, authority: Authority
) -> None:
    daemon, files = secured(make_daemon, authority)
    operator = authority.issue(KEY, Role.OPERATOR, "ann")

    async def work() -> None:
        async with AdminClient(daemon.admin_listen, KEY, seconds=30, tls=operator.tls(Role.OPERATOR), name="s1") as tool:
            await tool.describe()
            daemon.stop()
            with pytest.raises(CannotConnect):
                await tool.describe()
            replace(files, authority.issue(KEY, Role.STORAGE, "s1", file="new"))
            daemon.settings["admin_listen"] = daemon.admin_listen
            daemon.start()
            await tool.describe()

    loop.run(work())


def test_a_server_uses_its_new_certificate_and_streams_go_on(make_daemon: MakeDaemon, authority: Authority) -> None:
    daemon, _ = secured(make_daemon, authority)
    files = authority.issue(KEY, Role.SERVER, "one")
    operator = authority.issue(KEY, Role.OPERATOR, "ann")

    async def work() -> None:
        async with admin(daemon, operator) as tool:
            await tool.create_partitions([0, 1])
        async with replicas(daemon, files) as owner:
            await owner.open(0, 1, partitions=PARTITIONS)
            await owner.set_low_mark(0, 1, -1)
            stream = owner.append(0, 1)
            assert await append(stream, runs_of(1)) == 9
            first = owner._channel._channel
            for number in range(3):
                replace(files, authority.issue(KEY, Role.SERVER, "one", file=f"new-{number}"))
                await owner.open(1, 1, partitions=PARTITIONS)
                assert await append(stream, runs_of(1, first_id=10 + 10 * number)) == 19 + 10 * number
            assert owner._channel._channel is not first
            stream.cancel()

    loop.run(work())


def test_who_was_revoked_is_out_and_others_go_on(make_daemon: MakeDaemon, authority: Authority) -> None:
    """Append streams and calls that are open as well as new ones; the list is read while the daemon runs."""
    files = authority.issue(KEY, Role.STORAGE, "s1")
    daemon = make_daemon(**files.settings, tls_revoked=authority.revoke()).start()
    bad, good = (authority.issue(KEY, Role.SERVER, name) for name in ("bad", "good"))
    operator = authority.issue(KEY, Role.OPERATOR, "ann")

    async def work() -> None:
        async with admin(daemon, operator) as tool:
            await tool.create_partitions([0, 1])
        async with replicas(daemon, bad) as one, replicas(daemon, good) as other:
            streams = []
            for number, owner in enumerate((one, other)):
                await owner.open(number, 1, partitions=PARTITIONS)
                await owner.set_low_mark(number, 1, -1)
                streams.append(owner.append(number, 1))
                assert await append(streams[-1], runs_of(1)) == 9
            authority.revoke(bad)
            with pytest.raises(CannotConnect):
                assert await streams[0].receive() is None
            with pytest.raises(NotPermitted, match="was revoked"):
                await one.open(0, 1, partitions=PARTITIONS)
            assert await append(streams[1], runs_of(1, first_id=10)) == 19
            streams[1].cancel()

    loop.run(work())


# -- settings ----------------------------------------------------------------------------------------------------------


def test_a_daemon_does_not_start_with_a_certificate_that_is_not_its_own(
    make_daemon: MakeDaemon, authority: Authority
) -> None:
    """What else is wrong with one is in tests/unit/waltzd/wire/test_tls.py."""
    daemon = make_daemon(**authority.issue(OTHER, Role.STORAGE, "s1", file="foreign").settings)
    assert daemon.spawn().wait(30) == 2
    assert "W1002" in daemon.log


def test_a_port_that_others_reach_needs_certificates(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon(listen="0.0.0.0:0")
    assert daemon.spawn().wait(30) == 2
    assert "needs certificates" in daemon.log
    make_daemon("open", listen="0.0.0.0:0", plaintext="anywhere").start()


def test_callers_that_give_up_leave_nothing_behind(signed: tuple[Authority, Daemon]) -> None:
    """A channel that is closed while its certificate is replaced ends all that it opened."""
    authority, daemon = signed
    files = authority.issue(KEY, Role.SERVER, "one")

    async def work() -> None:
        client = replicas(daemon, files)
        with pytest.raises(WaltzError):
            await client.open(0, 1, partitions=PARTITIONS)
        replace(files, authority.issue(KEY, Role.SERVER, "one", file="new"))
        with pytest.raises(WaltzError):
            await client.open(0, 1, partitions=PARTITIONS)
        await client.close()
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        assert rest == set()

    loop.run(work())


def test_a_check_of_the_configuration_finds_what_a_start_would(authority: Authority, tmp_path: Path) -> None:
    """With `--check-config` and `config validate`, before a restart takes the daemon away."""
    key = UUID(int=77)
    storage, server = authority.issue(key, Role.STORAGE, "s1"), authority.issue(key, Role.SERVER, "a")
    other = authority.issue(key, Role.STORAGE, "s2")
    mixed = {**storage.settings, "tls_key": other.settings["tls_key"]}
    for given, said in (
        (storage.settings, None),
        (server.settings, "has the role server; this process needs the role storage"),
        (authority.issue(UUID(int=78), Role.STORAGE, "s1", file="foreign").settings, "belongs to the cluster"),
        (mixed, "do not make a usable certificate"),
        ({**storage.settings, "tls_ca": str(tmp_path / "nowhere.pem")}, "cannot read"),
    ):
        path = tmp_path / "storage.yml"
        fields = {"directory": tmp_path / "data", "cluster_key": key, "partitions": 1, **given}
        path.write_text("".join(f"{name}: {value}\n" for name, value in fields.items()))
        problems = verdict_of(str(path), None).problems
        assert verdict_of(str(path), None, with_files=False).problems == ()
        if said is None:
            assert problems == ()
        else:
            ((line, text),) = problems
            assert said in text
            assert line == 4

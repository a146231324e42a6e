"""A server with certificates between a storage and an application that have them too: the whole way of a transaction."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from uuid import UUID

import pytest

from tests.process.certificates import Authority, Files
from tests.process.daemon import KEY, PARTITIONS, Daemon
from tests.process.server import ServerDaemon
from tests.process.zookeeper import LocalZooKeeper
from waltzctl import main
from waltzd.client import loop
from waltzd.client.client import Client
from waltzd.cluster.cluster import Cluster
from waltzd.cluster.documents import ClusterMeta, Membership, ReplicaSets, StorageMeta
from waltzd.cluster.zookeeper import ZooKeeperCoordinator
from waltzd.errors import CannotConnect, NotPermitted, TlsMismatch
from waltzd.protocol.batches import FeedMode, Mounted, MountRequest, Refused, ServerFrame
from waltzd.protocol.locks import Committed
from waltzd.protocol.role import Role
from waltzd.wire import servers
from waltzd.wire.servers import ServerAdminClient, ServerClient
from waltzd.wire.storages import AdminClient


def connect(files: Files) -> Callable[[str, UUID | None], ServerClient]:
    tls = files.tls(Role.CLIENT)
    return lambda address, key: ServerClient(address, key, tls=tls)


@pytest.mark.parametrize("is_framed", [False, True], ids=["grpc", "frames"])
def test_a_transaction_travels_between_certificates(
    is_framed: bool,
    caplog: pytest.LogCaptureFixture,
    zookeeper: LocalZooKeeper,
    make_daemon: Callable[..., Daemon],
    make_server: Callable[..., ServerDaemon],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    authority = Authority(tmp_path / "ca")
    storage = make_daemon(**authority.issue(KEY, Role.STORAGE, "s1").settings).start()
    operator = authority.issue(KEY, Role.OPERATOR, "ann").tls(Role.OPERATOR)
    root = f"/tls/cluster-{is_framed}"

    async def create() -> None:
        async with AdminClient(storage.admin_listen, KEY, tls=operator) as admin:
            await admin.create_partitions(range(PARTITIONS))
        coordinator = ZooKeeperCoordinator(zookeeper.hosts, root)
        await coordinator.start()
        try:
            meta = ClusterMeta(name="tls", key=KEY, partitions=PARTITIONS, created="2026-01-01")
            place = StorageMeta(name="s1", listen=storage.listen, admin_listen=storage.admin_listen, group="g")
            sets = {number: {"s1": Membership.MEMBER} for number in range(PARTITIONS)}
            await Cluster.create(coordinator, meta, storages=[place], replicas=ReplicaSets(partitions=sets))
        finally:
            await coordinator.close()

    loop.run(create())
    files = authority.issue(KEY, Role.SERVER, "one")
    port = {} if is_framed else {"stream_port": -1}
    audit = {"audit_file": str(tmp_path / "server.log")}
    server = make_server("one", hosts=zookeeper.hosts, cluster=root, **files.settings, **port, **audit).start()

    async def work() -> None:
        application = authority.issue(KEY, Role.CLIENT, "app")
        async with Client(server.listen, feed=FeedMode.NONE, connect=connect(application)) as client:
            assert isinstance(await client.append(b"over TLS", partition=0), Committed)
        async with ServerAdminClient(server.admin_listen, KEY, tls=operator) as admin:
            assert (await admin.describe()).name == "one"
        app = application.tls(Role.CLIENT)
        eve = authority.issue(KEY, Role.CLIENT, "eve").tls(Role.CLIENT)
        async with ServerClient(server.listen, KEY, tls=app) as owner, ServerClient(server.listen, KEY, tls=eve) as other:
            place = (await owner.locate()).places[0]
            if is_framed:
                owner.expect("one", server.stream_listen)
                other.expect("one", server.stream_listen)
            registration = await owner.register()

            async def mount(port: ServerClient, token: bytes, number: int) -> Sequence[ServerFrame]:
                stream = port.mount()
                await stream.send(
                    [
                        MountRequest(
                            cluster_key=KEY,
                            partition=0,
                            generation=place.generation,
                            client=registration.client,
                            token=token,
                            number=number,
                            mark=-1,
                            feed=FeedMode.NONE,
                            credit=0,
                        )
                    ]
                )
                frames = await stream.receive()
                assert frames is not None
                return frames

            for port, token in ((other, registration.token), (other, b""), (owner, b""), (owner, bytes(32))):
                (refused,) = await mount(port, token, 1 << 30)
                assert isinstance(refused, Refused)
                assert isinstance(refused.error, NotPermitted), "one certificate cannot take what another was given"
            assert isinstance((await mount(owner, registration.token, 1))[0], Mounted)
            if is_framed:
                assert "through gRPC" not in caplog.text
                owner.expect("two", server.stream_listen)
                with pytest.raises(CannotConnect):  # frames and gRPC alike
                    await mount(owner, registration.token, 2)
                async with ServerClient(server.listen, KEY, tls=operator) as stranger:
                    stranger.expect("one", storage.stream_listen)
                    (refused,) = await mount(stranger, b"", 1)
                    assert isinstance(refused, Refused), "gRPC got through where another daemon takes the frames"
                assert "is used through gRPC" in caplog.text
                strange = authority.issue(KEY, Role.STORAGE, "s9").tls(Role.STORAGE)
                async with ServerClient(server.listen, KEY, tls=strange) as stranger:
                    stranger.expect("one", server.stream_listen)
                    with pytest.raises(NotPermitted, match="the role storage"):
                        await mount(stranger, registration.token, 1)
        async with ServerAdminClient(server.admin_listen, KEY, tls=app) as admin:
            with pytest.raises(NotPermitted):
                await admin.drain(True)

        # A server that answers late is looked at, and is no other program; a caller without certificate needs one.
        monkeypatch.setattr(servers, "STRANGE_SECONDS", 0.0)
        async with ServerClient(server.listen, KEY, tls=app) as late:
            assert len((await late.locate()).places) == PARTITIONS
        async with ServerClient(server.listen, KEY) as without:
            with pytest.raises(TlsMismatch):
                await without.locate()

    loop.run(work())
    server.stop()
    told = [json.loads(line) for line in (tmp_path / "server-traffic.log").read_text(encoding="utf-8").splitlines()]
    assert ("client/app", "Log/Mount") in {(one["who"].partition("/role/")[2], one["what"]) for one in told}


def options(files: Files) -> list[str]:
    """As an operator types them."""
    return ["--tls-certificate", str(files.certificate), "--tls-key", str(files.key), "--tls-ca", str(files.ca)]


def test_an_operator_makes_a_cluster(
    zookeeper: LocalZooKeeper,
    make_daemon: Callable[..., Daemon],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    authority = Authority(tmp_path / "ca")
    storage = make_daemon(**authority.issue(KEY, Role.STORAGE, "s1").settings).start()
    operator = options(authority.issue(KEY, Role.OPERATOR, "ann"))
    root = "/tls/operated"

    def waltzctl(*words: str) -> tuple[int, str, str]:
        code = main.run([*words, "--coordinator", zookeeper.hosts, "--root", root])
        said = capsys.readouterr()
        return code, said.out, said.err

    def create(*words: str, name: str = "s1", address: str = storage.admin_listen) -> tuple[int, str, str]:
        place = f"{name}={storage.listen},{address}"
        return waltzctl(
            "create-cluster",
            "--name",
            "tls",
            "--partitions",
            str(PARTITIONS),
            "--replicas",
            "1",
            "--storage",
            place,
            *words,
        )

    code, out, err = create()
    assert (code, out) == (2, "")
    assert f"W4003 {storage.admin_listen} speaks TLS" in err
    code, out, err = create(*options(authority.issue(KEY, Role.SERVER, "one")))
    assert (code, out) == (9, "")
    assert "W2024" in err
    code, out, err = create(*operator, name="s2")
    assert (code, out) == (4, "")
    assert "W4004" in err
    assert "/role/storage/s1, not of" in err
    code, out, err = create(*operator, address="127.0.0.1:1")
    assert (code, out) == (6, "")
    assert f"`cluster_key: {KEY}`" in err, "the key that is proposed is the one that certificates are there for"
    assert waltzctl("status", *operator)[0] == 3, "nothing was written"
    code, out, err = create(*operator)
    assert (code, err) == (0, "")
    assert out.startswith("created: cluster tls")

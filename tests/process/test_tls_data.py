"""The commands on data in a cluster with certificates: with one, without one, and with one of the wrong kind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.process.certificates import Authority
from tests.process.daemon import KEY, PARTITIONS, Daemon
from tests.process.server import ServerDaemon
from tests.process.test_tls_cluster import options
from tests.process.zookeeper import LocalZooKeeper
from waltzctl import main
from waltzd.protocol.role import Role

ROOT = "/tls/data"


def test_an_operator_reads_appends_and_compares(
    zookeeper: LocalZooKeeper,
    make_daemon: Callable[..., Daemon],
    make_server: Callable[..., ServerDaemon],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    authority = Authority(tmp_path / "ca")
    names = ("s1", "s2")
    daemons = [make_daemon(name, **authority.issue(KEY, Role.STORAGE, name).settings).start() for name in names]
    operator = options(authority.issue(KEY, Role.OPERATOR, "ann"))

    def waltzctl(*words: str) -> tuple[int, str, str]:
        code = main.run([*words, "--coordinator", zookeeper.hosts, "--root", ROOT])
        said = capsys.readouterr()
        return code, said.out, said.err

    places = [
        word
        for name, daemon in zip(names, daemons, strict=True)
        for word in ("--storage", f"{name}={daemon.listen},{daemon.admin_listen}")
    ]
    size = ["--name", "tls", "--partitions", str(PARTITIONS), "--replicas", "2"]
    assert waltzctl("create-cluster", *size, *places, *operator)[0] == 0
    certificate = authority.issue(KEY, Role.SERVER, "one").settings
    server = make_server("one", hosts=zookeeper.hosts, cluster=ROOT, **certificate).start()

    code, out, err = waltzctl("txn", "append", "0", "over TLS", "--lock", "write:door:1", "-o", "json", *operator)
    assert (code, err, json.loads(out)["id"]) == (0, "", 0)
    assert waltzctl("txn", "get", "0", "0", "-o", "raw", *operator) == (0, "over TLS", "")
    code, out, _ = waltzctl("txn", "tail", "0", "-o", "json", *operator)
    assert (code, json.loads(out)["payload"]) == (0, "over TLS")
    code, out, _ = waltzctl("lock", "explain", "0", "door", "1", "-o", "json", *operator)
    assert (code, json.loads(out)["marked_by"]["payload"]) == (0, "over TLS")
    code, out, _ = waltzctl("partition", "compare", "0", "-o", "json", *operator)
    assert (code, json.loads(out)["result"]) == (0, "same")

    load = ("append", "--at", server.listen, "--yes", "--count", "5", "--producers", "1", "--warm-up", "0")
    assert main.run(["bench", *load, "-o", "json", *operator]) == 0
    assert json.loads(capsys.readouterr().out)["attempts"] == 5

    for words in (["txn", "tail", "0", "--timeout", "1"], ["lock", "explain", "0", "door", "1"]):
        code, out, err = waltzctl(*words)
        assert (code, out) == (2, ""), words
        assert "W4003" in err
    code, out, _ = waltzctl("partition", "compare", "0")
    assert code == 7, "who cannot be asked is not the same"
    assert "speaks TLS" in out
    application = options(authority.issue(KEY, Role.CLIENT, "app"))
    code, out, err = waltzctl("txn", "tail", "0", *application)
    assert (code, out) == (9, "")
    assert "W2024" in err

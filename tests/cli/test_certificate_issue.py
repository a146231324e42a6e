"""`waltzctl certificate issue`: daemons start with what it makes, callers get in, and nothing is written over."""

from __future__ import annotations

import json
import re
import stat
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.cli.conftest import Tool
from tests.cli.example import examples
from tests.process.daemon import KEY, Daemon
from waltzd.__main__ import app as waltzd
from waltzd.errors.operations import BadConfig
from waltzd.protocol.role import Identity, Role
from waltzd.wire.tls import Tls


def issued(waltzctl: Tool, directory: Path, role: Role, *names: str) -> str:
    made = waltzctl("certificate", "issue", str(role), *names, "--cluster-key", str(KEY), "--directory", directory)
    assert (made.code, made.err) == (0, ""), made
    return made.out


def paths(directory: Path, role: Role, name: str) -> tuple[str, str, str]:
    return str(directory / f"{role}-{name}.pem"), str(directory / f"{role}-{name}.key"), str(directory / "ca.pem")


def test_examples_run(waltzctl: Tool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for words in examples(waltzctl, ["certificate", "issue"]):
        assert waltzctl(*words).code == 0, words


def test_a_script_is_told_the_same(waltzctl: Tool, tmp_path: Path) -> None:
    words = ("certificate", "issue", "operator", "ann", "--cluster-key", str(KEY), "--directory", tmp_path, "-o", "json")
    (told,) = json.loads(waltzctl(*words).out)["certificates"]
    certificate, key, ca = paths(tmp_path, Role.OPERATOR, "ann")
    uri = f"waltz://{KEY}/role/operator/ann"
    assert told == {"uri": uri, "tls_certificate": certificate, "tls_key": key, "tls_ca": ca}


@pytest.mark.parametrize("role", list(Role))
def test_a_certificate_says_who_it_is_for(waltzctl: Tool, tmp_path: Path, role: Role) -> None:
    directory = tmp_path / "made" / "here"
    assert f"waltz://{KEY}/role/{role}/two" in issued(waltzctl, directory, role, "one", "two")
    for name in ("one", "two"):
        assert Tls(*paths(directory, role, name), role=role, cluster=KEY).identity == Identity(KEY, role, name)
    private = [path for path in directory.iterdir() if stat.S_IMODE(path.stat().st_mode) == 0o600]
    assert sorted(path.name for path in private) == ["ca.key", f"{role}-one.key", f"{role}-two.key"]
    assert len(list(directory.iterdir())) == 6, "nothing half-made is left"


def test_daemons_start_with_what_it_prints(waltzctl: Tool, tmp_path: Path) -> None:
    said = {role: issued(waltzctl, tmp_path / "ca", role, "a") for role in (Role.STORAGE, Role.SERVER)}
    settings = {
        Role.STORAGE: f"directory: {tmp_path / 'data'}\ncluster_key: {KEY}\npartitions: 1\n",
        Role.SERVER: "name: a\ncoordinator: 127.0.0.1:1\ncluster: /waltz\n",
    }
    for role, lines in settings.items():
        path = tmp_path / f"{role}.yml"
        path.write_text(lines + said[role])
        checked = CliRunner().invoke(waltzd, [str(role), "--config", str(path), "--check-config"])
        assert checked.exit_code == 0, checked.output
    path.write_text(settings[Role.SERVER] + said[Role.STORAGE])
    checked = CliRunner().invoke(waltzd, ["server", "--config", str(path), "--check-config"])
    assert "this process needs the role server" in f"{checked.output}{checked.exception}"


def test_an_operator_of_the_same_authority_gets_in(waltzctl: Tool, tmp_path: Path) -> None:
    issued(waltzctl, tmp_path / "ca", Role.STORAGE, "s1")
    variables = re.findall(r"export (\w+)=(\S+)", issued(waltzctl, tmp_path / "ca", Role.OPERATOR, "ann"))
    certificate, key, ca = paths(tmp_path / "ca", Role.STORAGE, "s1")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables:
            patch.setenv(name, value)
        with Daemon(tmp_path / "s1", tls_certificate=certificate, tls_key=key, tls_ca=ca) as daemon:
            assert str(KEY) in waltzctl("storage", "describe", daemon.admin_listen).out


def test_nothing_is_written_over(waltzctl: Tool, tmp_path: Path) -> None:
    issued(waltzctl, tmp_path, Role.CLIENT, "a")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    again = ("certificate", "issue", "client", "b", "a", "--cluster-key", str(KEY), "--directory", tmp_path)
    told = waltzctl(*again)
    assert (told.code, told.out) == (4, "")
    assert "W2140" in told.err
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    (tmp_path / "ca.key").unlink()
    told = waltzctl(*again)
    assert told.code == 2
    assert f"W2035 {tmp_path / 'ca.key'} is not there" in told.err


def test_what_is_missing_is_said(waltzctl: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    words = ("certificate", "issue", "client", "a", "--cluster-key", str(KEY), "--directory", tmp_path / "ca")
    told = waltzctl(*words)
    assert (told.code, list((tmp_path / "ca").iterdir())) == (2, [])
    assert "W2035 the program openssl is not here" in told.err
    for names in (["a", "a"], ["a/b"]):
        told = waltzctl("certificate", "issue", "client", *names, "--cluster-key", str(KEY), "--directory", tmp_path)
        assert (told.code, "W1001" in told.err) == (2, True)


@pytest.mark.parametrize(("host", "names"), [("zk1.example", "DNS:zk1.example"), ("127.0.0.1", "IP Address:127.0.0.1")])
def test_zookeeper_is_told_by_its_host_and_has_no_role(waltzctl: Tool, tmp_path: Path, host: str, names: str) -> None:
    """Key and certificate in one file, as ZooKeeper reads them; no daemon takes it for one of the cluster."""
    said = waltzctl("certificate", "issue", "zookeeper", host, "--cluster-key", str(KEY), "--directory", tmp_path).out
    path = tmp_path / f"zookeeper-{host}.pem"
    assert f"ssl.keyStore.location={path}\nssl.keyStore.type=PEM\n" in said
    assert f"ssl.trustStore.location={tmp_path / 'zookeeper-ca.pem'}\nssl.trustStore.type=PEM\n" in said
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    files = sorted(found.name for found in tmp_path.iterdir())
    assert set(files) == {path.name, "zookeeper-ca.key", "zookeeper-ca.pem"}, (
        "the authority of the cluster signs no ZooKeeper"
    )
    text = path.read_text()
    assert (text.count("BEGIN PRIVATE KEY"), text.count("BEGIN CERTIFICATE")) == (1, 1)
    shown = subprocess.run(
        ["openssl", "x509", "-in", path, "-noout", "-ext", "subjectAltName"], capture_output=True, text=True, check=True
    ).stdout
    assert shown.splitlines()[1].strip() == names
    with pytest.raises(BadConfig, match="waltz://"):
        Tls(str(path), str(path), str(tmp_path / "zookeeper-ca.pem"), role=Role.SERVER, cluster=KEY)


def test_who_connects_to_zookeeper_has_a_certificate_of_its_authority(waltzctl: Tool, tmp_path: Path) -> None:
    """It names no host, and is good for callers only: its holder cannot stand for ZooKeeper."""
    words = ("certificate", "issue", "zookeeper-client", "a", "--cluster-key", str(KEY), "--directory", tmp_path)
    said = waltzctl(*words).out
    path = tmp_path / "zookeeper-client-a"
    assert f"coordinator_tls_certificate: {path}.pem\ncoordinator_tls_key: {path}.key\n" in said
    assert f"coordinator_tls_ca: {tmp_path / 'zookeeper-ca.pem'}\n" in said
    assert (tmp_path / "zookeeper-ca.key").exists()
    assert not (tmp_path / "ca.key").exists()
    shown = subprocess.run(
        ["openssl", "x509", "-in", f"{path}.pem", "-noout", "-ext", "subjectAltName,extendedKeyUsage"],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert "DNS:" not in shown
    assert "Server Authentication" not in shown
    assert "Client Authentication" in shown

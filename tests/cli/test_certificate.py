"""`waltzctl` with certificates, against a storage that has one and one that has none; and what is wrong with files."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from tests.cli.outcome import refused
from tests.cli.replicas import make_replicas
from tests.process.certificates import Authority, Files
from tests.process.daemon import KEY, Daemon
from tests.tiers import together
from waltzctl.main import COMMANDS
from waltzctl.shell.cluster_target import tls_of
from waltzd.client import loop
from waltzd.client.client import Client
from waltzd.errors import TlsMismatch
from waltzd.protocol.role import Role
from waltzd.wire import tls
from waltzd.wire.servers import ServerClient

Tool = Callable[..., Any]
SECURED = [("storage", name) for name in COMMANDS["storage"]] + [
    ("create-cluster",),
    ("status",),
    ("bench", "append"),
]
NAMES = ("--tls-certificate", "--tls-key", "--tls-ca")
VARIABLES = ("WALTZ_TLS_CERTIFICATE", "WALTZ_TLS_KEY", "WALTZ_TLS_CA")


def words(files: Files) -> list[str]:
    return [word for pair in zip(NAMES, paths(files), strict=True) for word in pair]


def paths(files: Files) -> list[str]:
    return [str(files.certificate), str(files.key), str(files.ca)]


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether somebody speaks TLS is known when they answer, however late."""
    monkeypatch.setattr(tls, "PROBE_SECONDS", 30.0)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def operator(authority: Authority) -> Files:
    return authority.issue(KEY, Role.OPERATOR, "ann")


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory, authority: Authority) -> Iterator[str]:
    """The address of a storage that answers only callers with certificates."""
    files = authority.issue(KEY, Role.STORAGE, "s1")
    with Daemon(tmp_path_factory.mktemp("closed"), **files.settings) as daemon:  # type: ignore[arg-type]
        yield daemon.admin_listen


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with Daemon(tmp_path_factory.mktemp("plain")) as daemon:
        yield daemon.admin_listen


@pytest.mark.parametrize("command", SECURED, ids=" ".join)
def test_every_command_that_asks_daemons_takes_a_certificate(waltzctl: Tool, command: tuple[str, ...]) -> None:
    told = waltzctl(*command, "--help").out
    for name in (*NAMES, *VARIABLES):
        assert name in told


def test_an_operator_does_everything_to_a_storage(waltzctl: Tool, closed: str, operator: Files) -> None:
    given = words(operator)
    assert str(KEY) in waltzctl("storage", "describe", closed, *given).out
    make_replicas(closed, 0, tls=tls_of(*paths(operator)))
    for command in (["availability", closed, "0", "--offline"], ["verify", closed]):
        done = waltzctl("storage", *command, *given)
        assert (done.code, done.err) == (0, ""), command


def test_the_environment_names_the_files_too(
    waltzctl: Tool, closed: str, operator: Files, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, path in zip(VARIABLES, paths(operator), strict=True):
        monkeypatch.setenv(variable, path)
    assert waltzctl("storage", "describe", closed).code == 0
    other = authority.issue(KEY, Role.CLIENT, "app")
    refused(waltzctl("storage", "describe", closed, *words(other)), 9, "the role client")
    for variable in VARIABLES:
        monkeypatch.setenv(variable, "")
    refused(waltzctl("storage", "describe", closed), 2, "W4003", "no certificate was given")


# -- what is wrong with the files --------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("first", range(3))
def test_half_of_a_certificate(waltzctl: Tool, operator: Files, first: int, count: int) -> None:
    chosen = [(first + step) % 3 for step in range(count)]
    given = [word for number in chosen for word in (NAMES[number], paths(operator)[number])]
    missing = [number for number in range(3) if number not in chosen]
    told = waltzctl("storage", "describe", "127.0.0.1:1", *given)
    refused(told, 2, "W1001", "needs all three", "was contacted", *(f"{NAMES[n]} or {VARIABLES[n]}" for n in missing))


@pytest.mark.parametrize("number", range(3))
def test_a_file_that_is_not_there(waltzctl: Tool, operator: Files, tmp_path: Path, number: int) -> None:
    given = words(operator)
    given[2 * number + 1] = str(tmp_path / "nowhere.pem")
    refused(waltzctl("storage", "describe", "127.0.0.1:1", *given), 2, "W1003", "nowhere.pem")


def test_a_key_that_others_can_read(waltzctl: Tool, authority: Authority) -> None:
    files = authority.issue(KEY, Role.OPERATOR, "open")
    files.key.chmod(0o644)
    told = waltzctl("storage", "describe", "127.0.0.1:1", *words(files))
    refused(told, 2, "W1001", f"chmod 600 {files.key}")
    assert "daemon was not started" not in told.err


def test_files_that_do_not_fit_together(waltzctl: Tool, authority: Authority, operator: Files) -> None:
    other = authority.issue(KEY, Role.OPERATOR, "bob")
    mixed = Files(operator.certificate, other.key, operator.ca)
    refused(waltzctl("storage", "describe", "127.0.0.1:1", *words(mixed)), 2, "W1001", "do not make a usable certificate")


@pytest.mark.parametrize("role", [Role.CLIENT, Role.SERVER, Role.STORAGE])
def test_a_certificate_of_another_role(waltzctl: Tool, closed: str, authority: Authority, role: Role) -> None:
    files = authority.issue(KEY, role, "other")
    told = waltzctl("storage", "availability", closed, "1", "--online", *words(files))
    refused(told, 9, "W2024", f"has the role {role}; waltzctl needs the role operator", "was contacted")


# -- daemons that cannot be talked to ----------------------------------------------------------------------------------


def test_a_daemon_with_certificates_and_a_caller_without(waltzctl: Tool, closed: str) -> None:
    refused(waltzctl("storage", "describe", closed), 2, f"W4003 {closed} speaks TLS", *NAMES, *VARIABLES)


def test_a_daemon_without_certificates_and_a_caller_with(waltzctl: Tool, plain: str, operator: Files) -> None:
    refused(waltzctl("storage", "describe", plain, *words(operator)), 2, f"W4003 {plain} does not speak TLS")


def test_an_application_need_not_wait_to_be_told(closed: str, plain: str, operator: Files) -> None:
    """Whatever its patience is: trying again would not help."""

    async def knock(address: str, files: Files | None) -> None:
        given = None if files is None else files.tls(Role.OPERATOR)
        await Client(address, connect=lambda where, key: ServerClient(where, key, tls=given)).open()

    for address, files, said in (
        (closed, None, f"{closed} speaks TLS, and no certificate was given"),
        (plain, operator, f"{plain} does not speak TLS, and a certificate was given"),
    ):
        with pytest.raises(TlsMismatch) as caught:
            loop.run(knock(address, files))
        assert caught.value.message == said


def test_a_load_on_a_cluster_that_cannot_be_talked_to(waltzctl: Tool, closed: str, plain: str, operator: Files) -> None:
    run = ("bench", "append", "--yes", "--at")
    refused(waltzctl(*run, closed), 2, f"W4003 {closed} speaks TLS", *NAMES, *VARIABLES)
    refused(waltzctl(*run, plain, *words(operator)), 2, f"W4003 {plain} does not speak TLS")


def test_a_certificate_of_another_cluster(waltzctl: Tool, closed: str, authority: Authority) -> None:
    files = authority.issue(UUID(int=7), Role.OPERATOR, "ann", file="foreign")
    refused(waltzctl("storage", "describe", closed, *words(files)), 6, "W4001", f"of the cluster {UUID(int=7)}")


def test_a_certificate_of_another_authority(waltzctl: Tool, closed: str, tmp_path: Path) -> None:
    files = Authority(tmp_path).issue(KEY, Role.OPERATOR, "ann")
    refused(waltzctl("storage", "describe", closed, *words(files)), 6, "W4001", "the authority of the other")


def test_nobody_there_is_not_about_certificates(waltzctl: Tool, operator: Files) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        for given in ([], words(operator)):
            told = waltzctl("storage", "describe", address, *given)
            refused(told, 6, "W4001", "check that the daemon runs")


# -- a certificate that may only read ----------------------------------------------------------------------------------

CHANGING = {
    "channel set": ["orders", "0"],
    "client disconnect": ["billing"],
    "cluster delete": [],
    "cluster finalize": [],
    "cluster load-metadata": ["metadata.jsonl"],
    "cluster rebuild-metadata": ["--name", "trial", "--storage", "one=127.0.0.1:1,127.0.0.1:2"],
    "cluster restore": ["/none", "--latest", "--storage", "one=127.0.0.1:1,127.0.0.1:2"],
    "cluster save-metadata": ["-"],
    "cluster set": ["--replicas", "3"],
    "create-cluster": ["--name", "trial", "--partitions", "1", "--storage", "one=127.0.0.1:1,127.0.0.1:2"],
    "group create": ["mailer"],
    "group parked list": ["mailer", "--payload"],
    "group parked replay": ["mailer", "--all"],
    "group remove": ["mailer"],
    "group reset": ["mailer", "--start", "last"],
    "group resume": ["mailer"],
    "group set": ["mailer", "--tries", "3"],
    "health": [],
    "partition assign": ["0", "--to", "s1"],
    "partition auto-assign": [],
    "partition compare": ["0"],
    "partition preferred": ["0", "--server", "one"],
    "partition rescue": ["0"],
    "partition transfer": ["0", "--to", "one"],
    "server drain": ["one"],
    "server remove": ["one"],
    "storage add": ["s9=127.0.0.1:1,127.0.0.1:2"],
    "storage availability": ["s1", "0", "--offline"],
    "storage recover": ["s1"],
    "policy set": ["--none"],
    "storage remove": ["s1"],
    "storage set": ["s1", "--group", "two"],
    "storage verify": ["127.0.0.1:1"],
    "txn append": ["0", "x"],
    "txn get": ["0", "0"],
    "txn grep": ["0", "--match", "x"],
    "txn history": ["order:17"],
    "txn tail": ["0"],
}


def test_every_change_of_a_cluster_is_among_those_that_an_observer_may_not_make() -> None:
    from importlib import import_module
    from inspect import signature

    for group, commands in COMMANDS.items():
        for name, (where, _) in commands.items():
            module, _, function = where.partition(":")
            if module.startswith(("waltzctl.placement", "waltzctl.groups")):
                taken = signature(getattr(import_module(module), function)).parameters.values()
                changes = any(str(one.annotation) in ("ChangeCommand", "AnyChange") for one in taken)
                assert not changes or f"{group} {name}".strip() in CHANGING


@together("command", sorted(CHANGING))
def test_an_observer_is_refused_before_anything_is_asked(waltzctl: Tool, authority: Authority, command: str) -> None:
    """Nobody answers at these addresses."""
    files = authority.issue(KEY, Role.OBSERVER, "eve")
    where = [] if "127.0.0.1:1" in CHANGING[command] else ["--coordinator", "127.0.0.1:1"]
    told = waltzctl(*command.split(), *CHANGING[command], *where, *words(files))
    refused(told, 9, "W2024", "eve has the role observer, which may only read", "nothing was changed")


def test_an_observer_looks_at_a_storage(waltzctl: Tool, closed: str, authority: Authority) -> None:
    given = words(authority.issue(KEY, Role.OBSERVER, "eve"))
    done = waltzctl("storage", "describe", closed, *given)
    assert (done.code, done.err) == (0, "")
    refused(waltzctl("storage", "availability", closed, "1", "--online", *given), 9, "W2024", "may only read")

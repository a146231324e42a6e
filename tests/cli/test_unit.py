"""`waltzctl generate unit`: what a unit says, and what systemd itself says of it."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.cli.conftest import Tool
from tests.cli.example import examples
from waltzctl.setup.unit import DEFAULT_PROGRAM, Wanted, unfit, unit
from waltzd.errors import EXIT_DISK_FAULT

ROOT = Path(__file__).parents[2]
KINDS = ("storage", "server", "zookeeper")
EXPOSURE_MAX = 2.5
"""Of ten; systemd's own measure of what a unit may do to its machine."""


def settings_of(text: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line and not line.startswith(("#", "[")):
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


def made(waltzctl: Tool, *words: str | Path) -> dict[str, list[str]]:
    outcome = waltzctl("generate", "unit", *words)
    assert (outcome.code, outcome.err) == (0, "")
    return settings_of(outcome.out)


def test_examples_run(waltzctl: Tool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    monkeypatch.chdir(tmp_path)
    for words in examples(waltzctl, ["generate", "unit"]):
        assert waltzctl(*words).code == 0, words
    assert (tmp_path / "waltz-server.service").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_the_files_in_configs_are_what_it_writes(waltzctl: Tool, kind: str) -> None:
    outcome = waltzctl("generate", "unit", kind, "--program", DEFAULT_PROGRAM)
    name = f"configs/waltz-{kind}.service"
    command = f"waltzctl generate unit {kind} --program {DEFAULT_PROGRAM}"
    assert (ROOT / name).read_text() == outcome.out, f"run: {command} --to {name} --force"
    assert f"`{command}`" in outcome.out


@pytest.mark.parametrize("kind", KINDS)
def test_systemd_finds_little_that_it_may_do(kind: str) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze, in Debian's package systemd")
    path = ROOT / f"configs/waltz-{kind}.service"
    said = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--no-pager", str(path)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    found = re.search(r"Overall exposure level for \S+: ([0-9.]+)", said.stdout)
    assert found, said.stderr
    assert float(found[1]) < EXPOSURE_MAX


@pytest.mark.parametrize("kind", KINDS)
def test_systemd_understands_every_line(kind: str, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze, in Debian's package systemd")
    path = tmp_path / f"waltz-{kind}.service"
    directory = "/var/lib/waltz/x" if kind != "server" else None
    wanted = Wanted(kind=kind, program="/bin/true", user="root", config="/etc/x.yml", directory=directory)
    path.write_text(unit(wanted, command="a test"))
    said = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert [line for line in said.stderr.splitlines() if path.name in line] == []


def test_paths_and_deadlines_are_those_of_the_configuration(
    waltzctl: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "s1.yml"
    path.write_text("directory: /srv/waltz/100%\ndrain_seconds: 300\n")
    found = made(waltzctl, "storage", "--config", "s1.yml", "--user", "log", "--program", "/x/waltzd")
    assert found["ExecStart"] == [f"/x/waltzd storage --config {path}"]
    assert found["ReadWritePaths"] == found["RequiresMountsFor"] == ["/srv/waltz/100%%"]
    assert "StateDirectory" not in found
    assert found["TimeoutStopSec"] == ["360s"]
    assert found["User"] == ["log"]
    path.write_text("directory: /var/lib/waltz/s1\n")
    assert made(waltzctl, "storage", "--config", path)["StateDirectory"] == ["waltz/s1"]
    path.write_text("name: one\ncoordinator: zk:2181\ndrain_seconds: 0\n")
    found = made(waltzctl, "server", "--config", path)
    assert found["TimeoutStopSec"] == ["60s"]
    assert "ReadWritePaths" not in found


def test_files_in_homes_can_be_read(waltzctl: Tool, tmp_path: Path) -> None:
    home = Path("/home")
    path = tmp_path / "one.yml"
    path.write_text("name: one\ncoordinator: zk:2181\n")
    words = ("server", "--config", path, "--program", DEFAULT_PROGRAM)
    assert made(waltzctl, *words)["ProtectHome"] == ["true"]
    assert made(waltzctl, *words[:-1], str(home / "ann/waltzd"))["ProtectHome"] == ["read-only"]
    pem = home / "ann/x.pem"
    path.write_text(f"name: one\ncoordinator: zk:2181\ntls_certificate: {pem}\ntls_key: {pem}\ntls_ca: {pem}\n")
    assert made(waltzctl, *words)["ProtectHome"] == ["read-only"]


@pytest.mark.parametrize("kind", ["storage", "server"])
def test_what_becomes_of_a_daemon_that_ends(waltzctl: Tool, kind: str) -> None:
    found = made(waltzctl, kind)
    assert found["Type"] == ["notify"]
    assert found["Restart"] == ["on-failure"]
    assert found["RestartPreventExitStatus"] == ["2 5 8"]
    assert found["StartLimitIntervalSec"] == ["0"], "a coordinator that is away for an hour is no reason to give up"
    assert "WatchdogSec" in found
    assert found["LimitNOFILE"] == ["65536"]
    assert found["ExecReload"] == ["/bin/kill -HUP $MAINPID"]


@pytest.mark.parametrize(("status", "waits"), [(EXIT_DISK_FAULT, True), (0, False), (1, False), (70, False)])
def test_only_a_failed_flush_makes_it_wait_before_the_next_start(
    waltzctl: Tool, tmp_path: Path, status: int, waits: bool
) -> None:
    """The line as systemd would run it: with `sleep` a program that only says that it was called."""
    (line,) = made(waltzctl, "storage")["ExecStopPost"]
    script = re.fullmatch(r"/bin/sh -c '(.*)'", line)
    assert script
    sleep = tmp_path / "sleep"
    sleep.write_text("#!/bin/sh\necho slept $1\n")
    sleep.chmod(0o755)
    said = subprocess.run(
        ["/bin/sh", "-c", script[1].replace("$$", "$")],
        env={"PATH": str(tmp_path), "EXIT_STATUS": str(status)}, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert said.stdout == ("slept 60\n" if waits else "")
    (stop,) = made(waltzctl, "storage")["TimeoutStopSec"]
    assert int(stop.removesuffix("s")) > 60, "or systemd would cut the wait short"


@pytest.mark.parametrize(
    ("words", "content", "said"),
    [
        (["storage"], "directory: data\n", "absolute path"),
        (["storage"], "directory: '/a b'\n", "without spaces"),
        (["storage"], "directory: /a$b\n", "dollar"),
        (["storage"], "directory: [\n", "not YAML"),
        (["server"], "directory: /a\n", "directory is not a setting"),
        (["server", "--program", "waltzd"], "name: one\ncoordinator: zk:1\n", "--program"),
        (["server", "--user", "a b"], "name: one\ncoordinator: zk:1\n", "--user"),
        (["zookeeper"], "", "no configuration file"),
    ],
)
def test_what_cannot_stand_in_a_unit(waltzctl: Tool, tmp_path: Path, words: list[str], content: str, said: str) -> None:
    path, to = tmp_path / "x.yml", tmp_path / "x.service"
    path.write_text(content)
    outcome = waltzctl("generate", "unit", *words, "--config", path, "--to", to)
    assert (outcome.code, outcome.out) == (2, "")
    assert said in outcome.err
    assert not to.exists()


@pytest.mark.parametrize("text", ["", " ", "a b", "a\nb", 'a"b', "a'b", "a\\b", "a;b", "a$b", "a:b", "\x00"])
def test_texts_that_would_mean_something_else(text: str) -> None:
    assert unfit(text)
    assert not unfit("/srv/waltz/100%_x-1.y@z")


def test_it_is_written_whole_or_not_at_all(waltzctl: Tool, tmp_path: Path) -> None:
    to = tmp_path / "x.service"
    outcome = waltzctl("generate", "unit", "server", "--to", to)
    assert (outcome.code, outcome.out, outcome.err) == (0, "", f"wrote {to}\n")
    assert to.read_text().startswith("# A server of Waltz.")
    assert [path.name for path in tmp_path.iterdir()] == ["x.service"]
    outcome = waltzctl("generate", "unit", "storage", "--to", to)
    assert (outcome.code, outcome.out) == (4, "")
    assert to.read_text().startswith("# A server of Waltz."), "what is there is not lost by a slip"
    assert waltzctl("generate", "unit", "storage", "--to", to, "--force").code == 0
    assert to.read_text().startswith("# A storage of Waltz.")
    nowhere = tmp_path / "missing/x.service"
    outcome = waltzctl("generate", "unit", "server", "--to", nowhere)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith("W1003 ")

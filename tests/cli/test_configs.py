"""The files of configs/ for the programs around Waltz: they ask for metrics that exist, name commands that exist, and those
programs accept them where they are there."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import yaml

from waltzctl.main import COMMANDS
from waltzd.archive.reader import ReadCounters
from waltzd.daemon import metrics
from waltzd.daemon.config import ServerConfig, StorageConfig
from waltzd.errors import EXIT_DISK_FAULT, EXIT_FINDINGS, EXIT_UNSAFE, EXIT_USAGE
from waltzd.protocol.descriptions import MetadataBackup, ScrubStatus, ServerDescription, Statistics, StorageDescription
from waltzd.protocol.groups import GroupTotals
from waltzd.protocol.histogram import Histogram

CONFIGS = Path(__file__).parents[2] / "configs"
DASHBOARD = json.loads((CONFIGS / "grafana-dashboard.json").read_text(encoding="utf-8"))
RULES = yaml.safe_load((CONFIGS / "alert-rules.yml").read_text(encoding="utf-8"))["groups"][0]["rules"]
PANELS = DASHBOARD["panels"]
WIDTH = 24
NAME = re.compile(r"\b(?:waltz|process)_\w+")
UNITS = ("storage", "server", "zookeeper")
EXPOSURE_MAX = 2.5
"""Of ten; systemd's own measure of what a unit may do to its machine."""


def names() -> set[str]:
    """Of all samples that daemons can give, without a partition or with some."""
    server = ServerDescription(
        name="one",
        cluster_key=UUID(int=1),
        instance=UUID(int=2),
        version="0.1",
        uptime_ms=1,
        is_connected=True,
        is_draining=False,
        is_leader=True,
        partitions=(),
        metadata_backup=MetadataBackup(),
        groups=GroupTotals(groups=0),
    )
    storage = StorageDescription(
        cluster_key=UUID(int=1),
        partitions=1,
        directory="x",
        version="0.1",
        free_bytes=1,
        scrub=ScrubStatus(period_seconds=1, bytes_per_second=1, done_bytes=0, total_bytes=0, age_ms=1),
        uptime_ms=1,
        is_draining=False,
        assigned=(),
        statistics=Statistics(),
    )
    pages = [
        metrics.page(
            metrics.of_server(
                server,
                cluster_partitions=1,
                unready=(),
                commit=Histogram(),
                certificate_seconds=1,
                archive=ReadCounters(),
            )
        )[0],
        metrics.page(metrics.of_storage(storage, unready=(), free_bytes_min=1, certificate_seconds=1))[0],
    ]
    found: set[str] = set()
    for line in b"".join(pages).decode().splitlines():
        kind = re.fullmatch(r"# TYPE (\w+) (\w+)", line)
        if kind is not None:
            found |= {kind[1] + suffix for suffix in ("_bucket", "_sum", "_count")} if kind[2] == "histogram" else {kind[1]}
    return found


def asked(expr: str) -> set[str]:
    return set(NAME.findall(expr))


def targets() -> Iterator[dict[str, Any]]:
    for panel in PANELS:
        yield from panel.get("targets", ())


# -- dashboard and alerts ----------------------------------------------------------------------------------------------


def test_the_dashboard_asks_for_what_there_is() -> None:
    exprs = [target["expr"] for target in targets()]
    assert len(exprs) > 25
    assert {name for expr in exprs for name in asked(expr)} <= names()
    assert all(asked(expr) for expr in exprs)
    legends = [target["legendFormat"] for target in targets()]
    assert "p99 {{instance}}" in legends
    assert not [legend for legend in legends if re.search(r"(?<!\{)\{(?!\{)", legend)], "a label has two braces"
    assert asked(DASHBOARD["templating"]["list"][1]["definition"]) <= names()
    assert all(expr.count("(") == expr.count(")") and expr.count("{") == expr.count("}") for expr in exprs)


def test_panels_have_their_own_place_number_and_explanation() -> None:
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    assert all(panel["description"] for panel in PANELS if panel["type"] != "row")
    taken: dict[tuple[int, int], str] = {}
    for panel in PANELS:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= WIDTH, panel["title"]
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert (x, y) not in taken, f"{panel['title']} is on {taken[x, y]}"
                taken[x, y] = panel["title"]


def test_alerts_ask_for_what_there_is_and_say_what_to_do() -> None:
    assert len({rule["alert"] for rule in RULES}) == len(RULES) >= 20
    for rule in RULES:
        assert asked(rule["expr"]), rule["alert"]
        assert asked(rule["expr"]) <= names(), rule["alert"]
        assert re.fullmatch(r"[0-9]+m", rule["for"])
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"]["summary"]
        assert rule["annotations"]["description"].endswith(".")


def test_prometheus_accepts_the_alerts() -> None:
    if shutil.which("promtool") is None:
        pytest.skip("needs promtool, in Debian's package prometheus")
    said = subprocess.run(
        ["promtool", "check", "rules", str(CONFIGS / "alert-rules.yml")],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert said.returncode == 0, said.stdout + said.stderr


def test_the_check_of_names_would_notice() -> None:
    assert asked("rate(waltz_server_comitted_total[5m])") - names() == {"waltz_server_comitted_total"}
    assert {"waltz_server_commit_seconds_bucket", "waltz_storage_flush_seconds_count"} <= names()


def test_commands_that_alerts_name_exist() -> None:
    descriptions = [rule["annotations"]["description"] for rule in RULES]
    named = {words.strip() for text in descriptions for words in re.findall(r"`waltzctl ((?:[a-z][a-z-]* ?)+)", text)}
    assert len(named) > 3
    assert named <= {f"{group} {name}".strip() for group, commands in COMMANDS.items() for name in commands}


# -- units -------------------------------------------------------------------------------------------------------------


def unit(kind: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in (CONFIGS / f"waltz-{kind}.service").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith(("#", "[")):
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


@pytest.mark.parametrize("kind", UNITS)
def test_systemd_finds_little_that_it_may_do(kind: str) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze, in Debian's package systemd")
    said = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--no-pager", str(CONFIGS / f"waltz-{kind}.service")],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    found = re.search(r"Overall exposure level for \S+: ([0-9.]+)", said.stdout)
    assert found, said.stderr
    assert float(found[1]) < EXPOSURE_MAX


@pytest.mark.parametrize("kind", UNITS)
def test_systemd_understands_every_line(kind: str, tmp_path: Path) -> None:
    """With a program that is there, and a user."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze, in Debian's package systemd")
    path = tmp_path / f"waltz-{kind}.service"
    text = (CONFIGS / path.name).read_text(encoding="utf-8")
    path.write_text(text.replace("/opt/waltz/bin/waltzd", "/bin/true").replace(f"User=waltz-{kind}", "User=root"))
    said = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert [line for line in said.stderr.splitlines() if path.name in line] == []


def test_each_daemon_has_a_user_of_its_own_and_bounds() -> None:
    assert {unit(kind)["User"][0] for kind in UNITS} == {f"waltz-{kind}" for kind in UNITS}
    for kind in UNITS:
        assert re.fullmatch("[0-9]+G", unit(kind)["MemoryMax"][0])
        assert unit(kind)["TasksMax"] == ["512"]


@pytest.mark.parametrize("kind", ["storage", "server"])
def test_what_becomes_of_a_daemon_that_ends(kind: str) -> None:
    found = unit(kind)
    assert found["Type"] == ["notify"]
    assert found["Restart"] == ["on-failure"]
    helpless = sorted((EXIT_USAGE, EXIT_UNSAFE, EXIT_FINDINGS))
    assert found["RestartPreventExitStatus"] == [" ".join(map(str, helpless))]
    assert found["StartLimitIntervalSec"] == ["0"], "a coordinator that is away for an hour is no reason to give up"
    assert "WatchdogSec" in found
    assert found["LimitNOFILE"] == ["65536"]
    assert found["ExecReload"] == ["/bin/kill -HUP $MAINPID"]


def test_units_leave_the_daemons_their_time_to_stop() -> None:
    """And a minute more: what was queued is written, and documents in the coordinator are changed."""
    kinds: tuple[tuple[str, type[Any]], ...] = (("storage", StorageConfig), ("server", ServerConfig))
    for kind, settings in kinds:
        drain = settings.__dataclass_fields__["drain_seconds"].default
        (stop,) = unit(kind)["TimeoutStopSec"]
        assert int(stop.removesuffix("s")) >= drain + 60


@pytest.mark.parametrize(("status", "waits"), [(EXIT_DISK_FAULT, True), (0, False), (1, False), (70, False)])
def test_only_a_failed_flush_makes_it_wait_before_the_next_start(tmp_path: Path, status: int, waits: bool) -> None:
    """The line as systemd would run it: with `sleep` a program that only says that it was called."""
    (line,) = unit("storage")["ExecStopPost"]
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
    (stop,) = unit("storage")["TimeoutStopSec"]
    assert int(stop.removesuffix("s")) > 60, "or systemd would cut the wait short"

"""`waltzctl generate dashboard` and `alerts`: they only ask for metrics that exist, and never write over what is there."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import yaml

from tests.cli.conftest import Tool
from tests.cli.example import examples
from waltzctl.main import COMMANDS
from waltzctl.setup.alert_rules import ALERTS
from waltzctl.setup.dashboard import WIDTH
from waltzd.daemon import metrics
from waltzd.errors import EXIT_CONFLICT, EXIT_NOT_FOUND, EXIT_USAGE, FileThere, PathMissing
from waltzd.protocol.descriptions import ServerDescription, Statistics, StorageDescription
from waltzd.protocol.histogram import Histogram

FROM_PROMETHEUS = {"up"}
NAME = re.compile(r"\b(?:waltz|process)_\w+")


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
    )
    storage = StorageDescription(
        cluster_key=UUID(int=1),
        partitions=1,
        directory="x",
        version="0.1",
        free_bytes=1,
        uptime_ms=1,
        is_draining=False,
        assigned=(),
        statistics=Statistics(),
    )
    pages = [
        metrics.page(
            metrics.of_server(server, cluster_partitions=1, unready=(), commit=Histogram(), certificate_seconds=1)
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


def expressions(dashboard: dict[str, Any]) -> Iterator[str]:
    for panel in dashboard["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))


def test_the_dashboard_asks_for_what_there_is(waltzctl: Tool) -> None:
    outcome = waltzctl("generate", "dashboard")
    assert (outcome.code, outcome.err) == (0, "")
    dashboard = json.loads(outcome.out)
    exprs = list(expressions(dashboard))
    assert len(exprs) > 25
    assert {name for expr in exprs for name in asked(expr)} <= names()
    assert all(asked(expr) for expr in exprs)
    legends = [target["legendFormat"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    assert "p99 {{instance}}" in legends
    assert not [legend for legend in legends if re.search(r"(?<!\{)\{(?!\{)", legend)], "a label has two braces"
    assert asked(dashboard["templating"]["list"][1]["definition"]) <= names()
    assert all(expr.count("(") == expr.count(")") and expr.count("{") == expr.count("}") for expr in exprs)


def test_panels_have_their_own_place_number_and_explanation(waltzctl: Tool) -> None:
    panels = json.loads(waltzctl("generate", "dashboard").out)["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert all(panel["description"] for panel in panels if panel["type"] != "row")
    taken: dict[tuple[int, int], str] = {}
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= WIDTH, panel["title"]
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert (x, y) not in taken, f"{panel['title']} is on {taken[x, y]}"
                taken[x, y] = panel["title"]


def test_alerts_ask_for_what_there_is_and_say_what_to_do(waltzctl: Tool) -> None:
    outcome = waltzctl("generate", "alerts")
    assert (outcome.code, outcome.err) == (0, "")
    (group,) = yaml.safe_load(outcome.out)["groups"]
    rules = group["rules"]
    assert len({rule["alert"] for rule in rules}) == len(rules) == len(ALERTS)
    for rule in rules:
        assert asked(rule["expr"]), rule["alert"]
        assert asked(rule["expr"]) <= names(), rule["alert"]
        assert re.fullmatch(r"[0-9]+m", rule["for"])
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"]["summary"]
        assert rule["annotations"]["description"].endswith(".")


def test_the_check_of_names_would_notice() -> None:
    assert asked("rate(waltz_server_comitted_total[5m])") - names() == {"waltz_server_comitted_total"}
    assert {"waltz_server_commit_seconds_bucket", "waltz_storage_flush_seconds_count"} <= names()


def test_commands_that_alerts_name_exist() -> None:
    named = {words.strip() for alert in ALERTS for words in re.findall(r"`waltzctl ((?:[a-z-]+ ?)+)", alert.description)}
    assert len(named) > 3
    assert named <= {f"{group} {name}".strip() for group, commands in COMMANDS.items() for name in commands}


@pytest.mark.parametrize("kind", ["dashboard", "alerts"])
def test_a_file_that_is_there_is_written_over_only_with_force(waltzctl: Tool, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "file"
    shown = waltzctl("generate", kind).out
    outcome = waltzctl("generate", kind, "--to", path)
    assert (outcome.code, outcome.out, outcome.err) == (0, "", f"wrote {path}\n")
    assert path.read_text(encoding="utf-8") == shown
    path.write_text("mine", encoding="utf-8")
    outcome = waltzctl("generate", kind, "--to", path)
    assert (outcome.code, outcome.out) == (EXIT_CONFLICT, "")
    assert outcome.err.startswith(f"{FileThere.code} {path} is there already\nNot done: nothing was written\nNext: ")
    assert path.read_text(encoding="utf-8") == "mine"
    assert waltzctl("generate", kind, "--to", path, "--force").code == 0
    assert path.read_text(encoding="utf-8") == shown
    assert [found.name for found in tmp_path.iterdir()] == ["file"]


def test_a_directory_that_is_not_there(waltzctl: Tool, tmp_path: Path) -> None:
    outcome = waltzctl("generate", "alerts", "--to", tmp_path / "nowhere" / "file")
    assert outcome.code in (EXIT_USAGE, EXIT_NOT_FOUND)
    assert outcome.err.startswith(PathMissing.code)


@pytest.mark.parametrize("kind", ["dashboard", "alerts"])
def test_examples_run(waltzctl: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.chdir(tmp_path)
    for words in examples(waltzctl, ["generate", kind]):
        assert waltzctl(*words).code == 0, words

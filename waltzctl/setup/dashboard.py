"""A dashboard for Grafana: one page on which a person sees how a cluster is, from what users notice down to disks. Pure.

It begins with a few numbers that are wrong only when something is wrong; below them each row asks further down.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

SCHEMA_VERSION = 39
WIDTH = 24
_SOURCE = {"type": "prometheus", "uid": "${source}"}


@dataclass(frozen=True, kw_only=True)
class Panel:
    title: str
    about: str
    queries: tuple[tuple[str, str], ...]
    """What is asked, and the name of the lines."""
    unit: str = "short"
    is_number: bool = False
    """One number in place of lines."""
    bad_below: float | None = None
    """A number turns red below this."""


@dataclass(frozen=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


def _rate(name: str, by: str = "partition") -> str:
    return f'sum by ({by}) (rate({name}{{job="$job"}}[$__rate_interval]))'


def _quantiles(name: str, by: str = "") -> tuple[tuple[str, str], ...]:
    labels = ", ".join(part for part in ("le", by) if part)
    legend = f" {{{{{by}}}}}" if by else ""
    rate = f'sum by ({labels}) (rate({name}_bucket{{job="$job"}}[$__rate_interval]))'
    return tuple(
        (f"histogram_quantile({share}, {rate})", f"p{spoken}{legend}")
        for share, spoken in (("0.5", "50"), ("0.99", "99"), ("0.999", "99.9"))
    )


def _of(name: str, how: str, by: str, *, legend: str = "") -> tuple[tuple[str, str], ...]:
    return ((f'{how} by ({by}) ({name}{{job="$job"}})', legend or f"{{{{{by}}}}}"),)


ROWS = (
    Row(
        "Now",
        (
            Panel(
                title="Partitions that are not open",
                about="Of all partitions of the cluster. Anything but 0 means that applications wait.",
                queries=(
                    (
                        'max(waltz_server_cluster_partitions{job="$job"}) - sum(waltz_server_partition_open{job="$job"})',
                        "closed",
                    ),
                ),
                is_number=True,
            ),
            Panel(
                title="Smallest margin",
                about="How many more storages may fail until the first partition stops.",
                queries=(('min(waltz_server_partition_margin{job="$job"})', "margin"),),
                is_number=True,
                bad_below=1,
            ),
            Panel(
                title="Servers that are ready",
                about="Those whose /readyz says so.",
                queries=(('sum(waltz_server_ready{job="$job"})', "servers"),),
                is_number=True,
                bad_below=1,
            ),
            Panel(
                title="Storages that are ready",
                about="Those whose /readyz says so.",
                queries=(('sum(waltz_storage_ready{job="$job"})', "storages"),),
                is_number=True,
                bad_below=1,
            ),
            Panel(
                title="Damaged or refused replicas",
                about="Anything but 0 is for an operator, unless it heals within minutes.",
                queries=(
                    (
                        'sum(waltz_storage_replica_damaged{job="$job"}) + sum(waltz_storage_replica_refused{job="$job"})',
                        "replicas",
                    ),
                ),
                is_number=True,
            ),
            Panel(
                title="Committed in a second",
                about="Transactions, over all partitions.",
                queries=(('sum(rate(waltz_server_committed_transactions_total{job="$job"}[$__rate_interval]))', "tx/s"),),
                is_number=True,
                unit="ops",
            ),
        ),
    ),
    Row(
        "Transactions",
        (
            Panel(
                title="Committed",
                about="Transactions in a second.",
                queries=((_rate("waltz_server_committed_transactions_total"), "{{partition}}"),),
                unit="ops",
            ),
            Panel(
                title="From arrival to outcome",
                about="What clients wait for at the servers; the way there and back comes on top.",
                queries=_quantiles("waltz_server_commit_seconds"),
                unit="s",
            ),
            Panel(
                title="Refused, by reason",
                about="REAL and IN_FLIGHT: others were faster. FLOOR and NEW_OWNER: the client lags behind.",
                queries=((_rate("waltz_server_refused_transactions_total", "reason"), "{{reason}}"),),
                unit="ops",
            ),
            Panel(
                title="Share that is refused",
                about="Of what clients wanted to append.",
                queries=(
                    (
                        f"{_rate('waltz_server_refused_transactions_total')} / "
                        f"{_rate('waltz_server_attempted_transactions_total')}",
                        "{{partition}}",
                    ),
                ),
                unit="percentunit",
            ),
            Panel(
                title="Written",
                about="Bytes of committed records in a second.",
                queries=((_rate("waltz_server_committed_bytes_total"), "{{partition}}"),),
                unit="Bps",
            ),
            Panel(
                title="Fed to readers",
                about="Bytes in a second, once for each mount.",
                queries=((_rate("waltz_server_fed_bytes_total"), "{{partition}}"),),
                unit="Bps",
            ),
        ),
    ),
    Row(
        "Replicas",
        (
            Panel(
                title="Margin",
                about="How many members may still fail before a partition stops.",
                queries=_of("waltz_server_partition_margin", "min", "partition"),
            ),
            Panel(
                title="Lag",
                about="Committed transactions that a storage lacks, in its worst partition.",
                queries=_of("waltz_server_replica_lag_transactions", "max", "storage"),
            ),
            Panel(
                title="States",
                about="In which states owners see replicas, and how many.",
                queries=_of("waltz_server_replica_state", "sum", "state"),
            ),
        ),
    ),
    Row(
        "Servers",
        (
            Panel(
                title="Partitions",
                about="That each server owns.",
                queries=_of("waltz_server_partitions", "sum", "instance"),
            ),
            Panel(
                title="Mounts",
                about="Clients at each server, once for each partition that they have mounted.",
                queries=_of("waltz_server_partition_mounts", "sum", "instance"),
            ),
            Panel(
                title="Tails",
                about="Memory for the newest transactions.",
                queries=_of("waltz_server_partition_tail_bytes", "sum", "instance"),
                unit="bytes",
            ),
            Panel(
                title="ZooKeeper is heard, and who leads",
                about="1 is yes.",
                queries=(
                    *_of("waltz_server_coordinator_connected", "min", "instance", legend="{{instance}} hears"),
                    *_of("waltz_server_leader", "max", "instance", legend="{{instance}} leads"),
                ),
            ),
            Panel(
                title="Sessions begun",
                about="Of partitions, in each interval. Many mean that storages come and go, or that much is written.",
                queries=(
                    (
                        'sum by (instance) (changes(waltz_server_partition_session{job="$job"}[$__rate_interval]))',
                        "{{instance}}",
                    ),
                ),
            ),
        ),
    ),
    Row(
        "Storages",
        (
            Panel(
                title="Writing and flushing",
                about="Of a group of appends.",
                queries=_quantiles("waltz_storage_flush_seconds", "instance")[1:2],
                unit="s",
            ),
            Panel(
                title="Appended",
                about="Bytes of records in a second.",
                queries=((_rate("waltz_storage_appended_bytes_total", "instance"), "{{instance}}"),),
                unit="Bps",
            ),
            Panel(
                title="Records in a group",
                about="What is written and flushed together.",
                queries=(
                    (
                        f"{_rate('waltz_storage_appended_records_total', 'instance')} / "
                        f"{_rate('waltz_storage_flush_seconds_count', 'instance')}",
                        "{{instance}}",
                    ),
                ),
            ),
            Panel(
                title="Waiting to be written",
                about="Bytes of appends.",
                queries=_of("waltz_storage_replica_queue_bytes", "sum", "instance"),
                unit="bytes",
            ),
            Panel(
                title="Free space",
                about="On the file system of the storage.",
                queries=_of("waltz_storage_free_bytes", "min", "instance"),
                unit="bytes",
            ),
            Panel(
                title="Read",
                about="Bytes in a second, for servers and tools.",
                queries=((_rate("waltz_storage_read_bytes_total", "instance"), "{{instance}}"),),
                unit="Bps",
            ),
            Panel(
                title="Calls that were refused",
                about="In a second. Some are usual when owners change.",
                queries=((_rate("waltz_storage_refused_calls_total", "instance"), "{{instance}}"),),
                unit="ops",
            ),
        ),
    ),
    Row(
        "Processes",
        (
            Panel(
                title="Processors",
                about="1 is one processor that does nothing else.",
                queries=((_rate("process_cpu_seconds_total", "instance"), "{{instance}}"),),
            ),
            Panel(
                title="Memory",
                about="Resident.",
                queries=_of("process_resident_memory_bytes", "sum", "instance"),
                unit="bytes",
            ),
            Panel(
                title="Open files",
                about="Connections included.",
                queries=_of("process_open_fds", "sum", "instance"),
            ),
        ),
    ),
)


def document() -> dict[str, Any]:
    """As Grafana imports it."""
    return {
        "title": "Waltz",
        "uid": "waltz",
        "tags": ["waltz"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_source_variable(), _job_variable()]},
        "panels": list(_placed()),
    }


def _source_variable() -> dict[str, Any]:
    return {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"}


def _job_variable() -> dict[str, Any]:
    query = "label_values(waltz_server_ready, job)"
    return {
        "name": "job",
        "label": "Cluster",
        "type": "query",
        "datasource": _SOURCE,
        "definition": query,
        "query": {"query": query, "refId": "job"},
        "refresh": 2,
        "sort": 1,
    }


def _placed() -> Iterator[dict[str, Any]]:
    """All panels, from left to right and from above to below."""
    number = top = 0
    for row in ROWS:
        number += 1
        yield {"id": number, "type": "row", "title": row.title, "collapsed": False, "panels": [],
               "gridPos": {"x": 0, "y": top, "w": WIDTH, "h": 1}}  # fmt: skip
        top += 1
        width, height = (4, 4) if row.panels[0].is_number else (8, 8)
        for at, panel in enumerate(row.panels):
            number += 1
            x, y = at * width % WIDTH, top + at * width // WIDTH * height
            yield _drawn(panel, number, {"x": x, "y": y, "w": width, "h": height})
        top += -(-len(row.panels) * width // WIDTH) * height


def _drawn(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit}
    if panel.bad_below is not None:
        steps = [{"color": "red", "value": None}, {"color": "green", "value": panel.bad_below}]
        defaults["thresholds"] = {"mode": "absolute", "steps": steps}
    elif panel.is_number and panel.unit == "short":
        steps = [{"color": "green", "value": None}, {"color": "red", "value": 1}]
        defaults["thresholds"] = {"mode": "absolute", "steps": steps}
    elif not panel.is_number:
        defaults["custom"] = {"fillOpacity": 10, "showPoints": "never"}
    return {
        "id": number,
        "type": "stat" if panel.is_number else "timeseries",
        "title": panel.title,
        "description": panel.about,
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + at), "datasource": _SOURCE, "expr": expr, "legendFormat": legend}
            for at, (expr, legend) in enumerate(panel.queries)
        ],
    }

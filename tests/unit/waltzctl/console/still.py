"""A console of which nothing moves: one look at a snapshot, and documents in memory."""

from __future__ import annotations

from typing import Any

from starlette.testclient import TestClient

from waltzctl.console.site import Session, Site
from waltzctl.console.watch import Point, Seen, Watch
from waltzctl.health.facts import Facts, HealthReport
from waltzctl.health.rates import rates
from waltzctl.health.rules import diagnose, judge
from waltzctl.shell.cluster_target import ClusterTarget
from waltzctl.snapshot.cluster_snapshot import ClusterSnapshot
from waltzd.cluster.cluster import Cluster
from waltzd.errors import CannotConnect

REACH = ClusterTarget(
    hosts="zk:1", root="/waltz", tls=None, name="trial", is_protected=False,
    origins={"directory": ("a place", "--directory"), "root": ("/waltz", "the default")},
)  # fmt: skip
HOST = "127.0.0.1:8765"
AT = "2026-11-24T12:00:00Z"


def seen_of(snapshot: ClusterSnapshot, **changes: Any) -> Seen:
    facts = Facts(snapshot=snapshot, **changes)
    report = HealthReport(facts=facts, verdict=judge(facts), at=AT, milliseconds=1.0)
    found = rates(snapshot, snapshot, 2.0)
    return Seen(
        number=1,
        report=report,
        rates=found,
        trail=(Point(at=0.0, total=found.total),),
        checks=tuple(diagnose(facts)),
    )


class Poll:
    """Documents in memory, or none."""

    def __init__(self, cluster_: Cluster | None) -> None:
        self.found = cluster_

    async def cluster(self) -> Cluster:
        if self.found is None:
            raise CannotConnect("no ZooKeeper listens there")
        return self.found


class Still(Watch):
    """It has looked once."""

    def __init__(self, seen: Seen, documents: Cluster | None = None) -> None:
        super().__init__(REACH)
        self.seen = seen
        self.poll = Poll(documents)  # type: ignore[assignment]

    async def now(self) -> Seen:
        return self.seen


def visiting(site: Site) -> TestClient:
    """A browser that is in, whose pages stand below no place: a test may name their addresses."""
    site.auth._sessions["cookie"] = Session(cookie="cookie")
    return TestClient(site.app, base_url=f"http://{HOST}", cookies={site.cookie: "cookie"})

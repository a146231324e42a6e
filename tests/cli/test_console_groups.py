"""The pages of consumer groups: the figures of `waltzctl group`, and the commands that change something."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from starlette.testclient import TestClient

from tests.cli.group_servers import Servers, member, place, running
from tests.unit.snapshots import well
from tests.unit.waltzctl.console.still import Still, seen_of, visiting
from waltzctl.console.site import SessionAuth, Site, hosts_of
from waltzd.cluster.cluster import Cluster
from waltzd.protocol.groups import ParkedTransaction

NASTY = "<script>document.title = 'owned'</script>"
PATIENCE_SECONDS = 60


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Servers]:
    with running(monkeypatch) as found:
        found.put(
            3,
            place(0, floor=89, reach=95, open=2, parked=2, is_at_work=True, in_flight=2, members=(member(),), delivered=12),
            place(1, floor=5, stopped="id 6: no such address"),
            partitions="0-1",
        )
        found.parked["mailer"] = [ParkedTransaction(0, 17, 5, "one", NASTY), ParkedTransaction(0, 20, 1, "one", "rejected")]
        yield found


@contextmanager
def visitor(servers: Servers) -> Iterator[TestClient]:
    documents = Cluster(servers.tree.connect())
    with visiting(Site(Still(seen_of(well()), documents), SessionAuth(hosts=hosts_of("127.0.0.1", 8765)))) as client:
        yield client


def numbers(html: str, label: str) -> list[list[str]]:
    """Of each row of a table, what programs read."""
    part = html.partition(f'aria-label="{label}"')[2].partition("</table>")[0]
    return [re.findall(r'<data value="([^"]*)"', row) for row in re.findall(r"<tr>.*?</tr>", part, re.DOTALL)[1:]]


def test_pages_say_what_the_tool_says(servers: Servers) -> None:
    with visitor(servers) as client:
        groups = client.get("/groups").text
        assert numbers(groups, "Consumer groups") == [["1", str(2 + 4 + 94), "2", "2"]]
        assert 'href="/groups/mailer"' in groups
        assert "waltzctl group list" in groups
        html = client.get("/groups/mailer").text
        assert "waltzctl group describe mailer" in html
        assert "■" in html, "it is as bad as where it is worst"
        assert "id 6: no such address" in html
        assert "5 tries with pauses of 1 s, 5 s, 30 s, then put aside" in html
        assert [row[:4] for row in numbers(html, "Where it stands")] == [["0", "1", "6", "89"], ["1", "0", "94", "5"]]
        assert [row[:2] for row in numbers(html, "Parked")] == [["0", "17"], ["0", "20"]]
        assert 'href="/transactions/0-17"' in html
        assert NASTY not in html
        assert "waltzctl group resume mailer" in html
        assert "waltzctl group parked replay mailer --all" in html
        for name in ("mailr", "a" * 100, "%3Cscript%3E"):
            assert client.get(f"/groups/{name}").status_code == 404


def test_what_does_not_answer_is_missed_by_name(servers: Servers) -> None:
    servers.silent.add("b")
    with visitor(servers) as client:
        assert "server b does not answer, and may know more" in client.get("/groups/mailer").text
        assert client.get("/groups").status_code == 200


def test_where_there_are_no_groups(servers: Servers) -> None:
    servers.groups.clear()
    with visitor(servers) as client:
        assert "There are no consumer groups" in client.get("/groups").text

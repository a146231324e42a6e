"""The pages of durable groups: the figures of `waltzctl group`, and its plans, in a browser as well."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import uvicorn
from starlette.testclient import TestClient

from tests.cli.browser import ENTER, Browser, missing
from tests.cli.group_servers import Servers, member, place, running
from tests.unit.pictures import well
from tests.unit.waltzctl.console.still import HOST, Still, named, seen_of
from waltzctl.console.door import Door, hosts_of
from waltzctl.console.site import Site
from waltzd.cluster.cluster import Cluster
from waltzd.protocol.groups import Change, ParkedTransaction

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


def site(servers: Servers, *, allows_changes: bool = True, port: int = 8765) -> Site:
    door = Door(hosts=hosts_of("127.0.0.1", port), is_open=True)
    documents = Cluster(servers.tree.connect())
    return Site(Still(seen_of(well()), documents), door, allows_changes=allows_changes)


@contextmanager
def visiting(servers: Servers, **given: Any) -> Iterator[TestClient]:
    with TestClient(named(site(servers, **given).app), base_url=f"http://{HOST}") as client:
        yield client


def numbers(html: str, label: str) -> list[list[str]]:
    """Of each row of a table, what programs read."""
    part = html.partition(f'aria-label="{label}"')[2].partition("</table>")[0]
    return [re.findall(r'<data value="([^"]*)"', row) for row in re.findall(r"<tr>.*?</tr>", part, re.DOTALL)[1:]]


def test_pages_say_what_the_tool_says(servers: Servers) -> None:
    with visiting(servers, allows_changes=False) as client:
        groups = client.get("/groups").text
        assert numbers(groups, "Durable groups") == [["1", str(2 + 4 + 94), "2", "2"]]
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
        assert "/change/" not in html, "this console only looks"
        for name in ("mailr", "a" * 100, "%3Cscript%3E"):
            assert client.get(f"/groups/{name}").status_code == 404


def test_what_does_not_answer_is_missed_by_name(servers: Servers) -> None:
    servers.silent.add("b")
    with visiting(servers) as client:
        assert "server b does not answer, and may know more" in client.get("/groups/mailer").text
        assert client.get("/groups").status_code == 200


@pytest.mark.parametrize(
    ("address", "step", "told"),
    [
        ("group-parked-replay?name=mailer&ids=all", "2 are to be done again", (Change.REPLAY, 0, (17, 20))),
        ("group-parked-replay?name=mailer&ids=0:17", "1 is to be done again: id 17", (Change.REPLAY, 0, (17,))),
        ("group-parked-discard?name=mailer&ids=0:20", "1 is left for good: id 20", (Change.DISCARD, 0, (20,))),
        ("group-resume?name=mailer", "go on; it stopped at id 6", (Change.GO_ON, 1, ())),
        ("group-skip?name=mailer&partition=1&to=41", "leave out what is not done up to 41", (Change.SKIP, 1, (41,))),
    ],
)
def test_a_change_is_the_plan_of_the_tool(servers: Servers, address: str, step: str, told: object) -> None:
    with visiting(servers) as client:
        assert address.replace("&", "&amp;").replace(":", "%3A") in client.get("/groups/mailer").text or "skip" in address
        html = client.get(f"/change/{address}").text
        assert step in html
        form = dict(re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)">', html))
        wrong = client.post(f"/change/{address.partition('?')[0]}", data=form | {"confirm": "mailr"})
        assert (wrong.status_code, servers.asked) == (400, [])
        client.post(f"/change/{address.partition('?')[0]}", data=form | {"confirm": "mailer", "reason": "a trial"})
        for _ in range(600):
            if "begun" not in client.get("/changes").text:
                break
        assert [(verb, change) for _, verb, change in servers.asked] == [("change", told)]
        assert "done" in client.get("/changes").text


@pytest.mark.parametrize(
    "address",
    [
        "group-skip?name=mailer&partition=x&to=1", "group-skip?name=mailer&partition=0&to=-1", "group-skip?name=mailer",
        "group-parked-replay?name=mailer&ids=17", "group-parked-replay?name=mailer&ids=--all",
    ],
)  # fmt: skip
def test_nonsense_is_no_plan(servers: Servers, address: str) -> None:
    with visiting(servers) as client:
        assert client.get(f"/change/{address}").status_code == 400


def test_where_there_are_no_groups(servers: Servers) -> None:
    servers.groups.clear()
    with visiting(servers) as client:
        assert "There are no durable groups" in client.get("/groups").text


@contextmanager
def listening(servers: Servers) -> Iterator[str]:
    """On a thread; its address."""
    config = uvicorn.Config(lambda: None, log_config=None, lifespan="off", ws="none", port=0)
    bound = config.bind_socket()
    port = bound.getsockname()[1]
    config.app = named(site(servers, port=port).app)
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        server.force_exit = True
        thread.join(PATIENCE_SECONDS)


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_a_parked_transaction_is_replayed_in_a_browser(servers: Servers) -> None:
    """By keyboard: the link in its row, the plan, the name, and it is done."""
    with listening(servers) as home, Browser() as browser:
        for width in (1280, 390):
            browser.look(width=width)
            browser.open(f"{home}/groups/mailer")
            assert browser.run("return document.documentElement.scrollWidth <= innerWidth")
            assert browser.run("return document.title").startswith("Group mailer")
            assert browser.complaints() == []
        assert browser.barriers() == []
        browser.run('document.querySelector(\'[href*="parked-replay"][href*="17"]\').focus()')
        browser.press(ENTER)
        browser.until(lambda: "1 is to be done again: id 17" in browser.text("main"))
        browser.run("document.querySelector('[name=confirm]').focus()")
        browser.press(*"mailer", ENTER)
        browser.until(lambda: browser.url == f"{home}/changes")

        def is_done() -> bool:  # nothing looks at this cluster again, so the page stays as it was
            browser.open(f"{home}/changes")
            return "done" in browser.text("main")

        browser.until(is_done)
        assert [change for _, _, change in servers.asked] == [(Change.REPLAY, 0, (17,))]

"""The pages of the console, made of pictures: no daemon, no network, no browser.

Who may come into the console.
"""

from __future__ import annotations

import asyncio
import html
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from starlette.testclient import TestClient

from tests.cli.test_mentions import complaint
from tests.unit.snapshots import owned, partition, replica, silent, storage, well
from tests.unit.waltzctl.console.still import HOST, Still, seen_of, visiting
from waltzctl.console.pages import partition_columns
from waltzctl.console.site import ENTRIES, HEADERS, SESSIONS_MAX, SessionAuth, Site, hosts_of
from waltzctl.console.watch import Seen
from waltzctl.health import top
from waltzctl.health.facts import Lost
from waltzctl.show import cluster
from waltzctl.show.forms import objects
from waltzd.cluster.cluster import Cluster
from waltzd.cluster.documents import HistoryEntry
from waltzd.cluster.memory import MemoryTree
from waltzd.errors import CannotConnect
from waltzd.protocol.descriptions import BackedUp

NASTY = "<script>alert(1)</script>"
LOOKING = ["/", "/partitions", "/partitions/0", "/storages", "/servers"]
"""Pages that a look is enough for."""


def browser(seen: Seen, documents: Cluster | None = None) -> TestClient:
    """A browser that is in."""
    return visiting(Site(Still(seen, documents), SessionAuth(hosts=hosts_of("127.0.0.1", 8765))))


def table_of(html: str, label: str) -> list[dict[str, str]]:
    """Rows of a table: by the keys of JSON, what programs read."""
    part = html.partition(f'aria-label="{label}"')[2].partition("</table>")[0]
    keys = re.findall(r'<th scope="col"[^>]*?(?:data-key="([^"]*)")?>', part)
    rows = []
    for row in re.findall(r"<tr>\s*<th scope=\"row\".*?</tr>", part, re.DOTALL):
        cells = re.findall(r"<t[hd][^>]*data-label[^>]*>(.*?)</t[hd]>", row, re.DOTALL)
        values = [re.search(r'<data value="([^"]*)"', cell) for cell in cells]
        rows.append({key: found[1] if found else "" for key, found in zip(keys, values, strict=True) if key})
    return rows


def agree(rows: Sequence[Mapping[str, str]], told: Sequence[Mapping[str, Any]]) -> int:
    """Every number of a table is that of JSON; how many there are."""
    numbers = 0
    assert len(rows) == len(told)
    for row, reported in zip(rows, told, strict=True):
        for key, value in row.items():
            expected = reported[key]
            is_number = isinstance(expected, int | float) and not isinstance(expected, bool)
            assert value == (str(expected) if is_number else ""), key
            numbers += is_number
    return numbers


# -- who may see it ----------------------------------------------------------------------------------------------------


def test_a_browser_comes_in_by_the_token_once() -> None:
    tokens: list[str] = []
    auth = SessionAuth(hosts=hosts_of("127.0.0.1", 8765), report=tokens.append)
    auth.begin()
    site = Site(Still(seen_of(well())), auth)
    client = TestClient(site.app, base_url=f"http://{HOST}")
    for path in (*LOOKING, "/nowhere", "/enter?token=wrong"):
        refused = client.get(path)
        assert refused.status_code == 403
        assert "W2321" in refused.text
        assert "trial" not in refused.text, "not even the name of the cluster is told"
        assert "set-cookie" not in refused.headers
    entered = client.get(f"/enter?token={tokens[0]}")
    home = entered.headers["refresh"].removeprefix("0; url=")
    cookie = entered.headers["set-cookie"]
    assert cookie.startswith("waltz-console-8765=")
    assert {"HttpOnly", "SameSite=strict", f"Path={home}"} <= set(cookie.split("; "))
    shown = client.get(home)
    assert shown.status_code == 200
    links = re.findall(r'(?:href|action)="(/[^"]*)"', shown.text)
    assert len(links) > 10
    assert all(link.startswith((home, "/static/")) for link in links), "and every link stays there"
    for path in (*LOOKING, "/nowhere"):
        assert client.get(home.rstrip("/") + path).status_code == (404 if path == "/nowhere" else 200)
    assert TestClient(site.app, base_url=f"http://{HOST}").get(f"/enter?token={tokens[0]}").status_code == 403


def test_a_cookie_goes_to_no_other_port_and_opens_nothing_without_the_place_of_its_pages() -> None:
    tokens: list[str] = []
    auth = SessionAuth(hosts=hosts_of("127.0.0.1", 8765), report=tokens.append)
    auth.begin()
    site = Site(Still(seen_of(well())), auth)

    def enter() -> tuple[TestClient, str, str]:
        client = TestClient(site.app, base_url=f"http://{HOST}")
        home = client.get(f"/enter?token={tokens[-1]}").headers["refresh"].removeprefix("0; url=")
        return client, home, next(iter(client.cookies.values()))

    (client, home, cookie), (_, other_home, other) = enter(), enter()
    for path in ("/", "/partitions", "/static/console.js"):
        assert "cookie" not in client.get(path).request.headers, "a browser sends it below its place only"
    bare = TestClient(site.app, base_url=f"http://{HOST}")
    for given, path in ((cookie, "/"), (cookie, other_home), (other, home), ("", home), (cookie, home[:-2] + "/")):
        assert bare.get(path, headers={"cookie": f"{site.cookie}={given}"}).status_code == 403
    assert bare.get(home, headers={"cookie": f"{site.cookie}={cookie}"}).status_code == 200


@pytest.mark.parametrize("host", ["evil.example:8765", "127.0.0.1:1", "127.0.0.1", "", "a" * 300, "127.0.0.1:8765, x"])
def test_another_name_is_refused(host: str) -> None:
    client = browser(seen_of(well()))
    for path in ("/", "/static/console.js", "/enter"):
        assert client.get(path, headers={"host": host}).status_code == 421


@pytest.mark.parametrize("path", ["*", "evil.example:80", "foo"])
def test_a_path_without_a_slash_is_closed_like_every_other(path: str) -> None:
    """uvicorn passes on what `OPTIONS *` and CONNECT ask for; that was an IndexError, with a traceback for each."""
    auth = SessionAuth(hosts=hosts_of("127.0.0.1", 8765))
    scope = {"type": "http", "method": "GET", "path": path, "query_string": b"", "headers": [(b"host", HOST.encode())]}
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(Site(Still(seen_of(well())), auth).app(scope, None, send))  # type: ignore[arg-type]
    assert sent[0]["status"] == 403
    assert HEADERS.items() <= {(name.decode(), value.decode()) for name, value in sent[0]["headers"]}


def test_every_answer_forbids_what_is_not_ours() -> None:
    client = browser(seen_of(well()))
    for path in ("/", "/nowhere", "/static/console.js", "/static/nothing", "/favicon.ico"):
        answer = client.get(path, follow_redirects=False)
        assert {name: answer.headers[name] for name in HEADERS} == HEADERS
    assert client.get("/", headers={"host": "evil.example"}).headers["x-frame-options"] == "DENY"


def test_nothing_is_changed_by_a_console_that_looks() -> None:
    client = browser(seen_of(well()))
    for path in LOOKING:
        assert client.post(path).status_code == 405


# -- what is shown -----------------------------------------------------------------------------------------------------


def test_every_page_names_its_command_and_is_small() -> None:
    client = browser(seen_of(well()))
    for path in LOOKING:
        answer = client.get(path)
        assert answer.status_code == 200, path
        assert "waltzctl " in answer.text
        assert "--directory &#39;a place&#39;" in answer.text
        assert len(answer.content) < 100_000
        assert "<script>" not in answer.text
        assert not re.search(r"\son\w+=|\sstyle=|javascript:", answer.text), "the policy would refuse it"
        assert not re.search(r'(?:src|href)="(?:https?:)?//', answer.text), "nothing comes from outside"
    whole = sum(len(client.get(found).content) for found in re.findall(r'"(/static/[^"]+)"', client.get("/").text))
    assert whole + len(client.get("/").content) < 100_000


def test_commands_that_change_something_can_be_typed() -> None:
    client = browser(seen_of(replace(well(), moves={0: ("s1", "s2")})))
    verbs = "server drain", "partition transfer 0 --to", "partition assign 0 --cancel"
    for path, verb in zip(("/servers", "/partitions/0", "/partitions/0"), verbs, strict=True):
        shown = client.get(path).text.partition("<h2>Change</h2>")[2]
        commands = [html.unescape(one) for one in re.findall(r"<code[^>]*>waltzctl ([^<]*)</code>", shown)]
        assert any(one.startswith(verb) for one in commands), path
        assert [complaint(one) for one in commands if complaint(one)] == []


def test_pages_are_well_made() -> None:
    """What can be checked without a browser: one head line, levels without a gap, ids once, labels of all fields."""
    client = browser(seen_of(well()))
    for path in LOOKING:
        html = client.get(path).text
        levels = [int(level) for level in re.findall(r"<h([1-6])", html)]
        assert levels[0] == 1
        assert levels.count(1) == 1
        assert all(later - before <= 1 for before, later in pairwise(levels))
        ids = re.findall(r'\sid="([^"]+)"', html)
        assert len(ids) == len(set(ids))
        assert '<html lang="en">' in html


def test_numbers_are_those_of_json() -> None:
    snapshot = well()
    seen = seen_of(snapshot)
    client = browser(seen)
    assert seen.rates is not None
    listed = cluster.partitions(snapshot)
    told = [
        first | {key: value for key, value in second.items() if key not in first}
        for first, second in zip(
            objects(listed.columns, listed.rows), objects(top.PARTITION_RATES, seen.rates.partitions), strict=True
        )
    ]
    assert agree(table_of(client.get("/partitions").text, "Partitions"), told) >= 20
    html = client.get("/storages").text
    assert agree(table_of(html, "Storages"), objects(cluster.STORAGES, snapshot.storages)) >= 6
    assert agree(table_of(html, "In the last seconds"), objects(top.STORAGE_RATES, seen.rates.storages)) >= 6
    listed_servers = cluster.servers(snapshot)
    html = client.get("/servers").text
    assert agree(table_of(html, "Servers"), objects(listed_servers.columns, listed_servers.rows)) >= 2


def test_the_columns_of_partitions_keep_their_keys() -> None:
    keys = [column.key for column in partition_columns()]
    assert len(keys) == len(set(keys))
    assert {"committed", "level", "tx_per_second", "lag"} <= set(keys)


def test_what_is_wrong_stands_on_the_first_page_with_its_cure() -> None:
    ill = well(storages=(silent(storage("s1"), CannotConnect("gone")), storage("s2"), storage("s3")))
    html = browser(seen_of(ill)).get("/").text
    assert "DEGRADED" in html
    assert "Next:" in html
    assert "▲" in html, "by shape and word, too"
    storages = browser(seen_of(ill)).get("/storages").text
    assert "silent" in storages
    assert storages.count("gone") == 1, "beside the storage, and nowhere else"


def test_without_zookeeper_pages_say_so_and_show_the_rest() -> None:
    lost = Lost(cause=CannotConnect("no ZooKeeper listens there"), seen="2026-11-24T11:59:00Z")
    client = browser(seen_of(well(), lost=lost))
    for path in LOOKING:
        answer = client.get(path)
        assert answer.status_code == 200, path
        assert "ZooKeeper does not answer, it did at 2026-11-24T11:59:00Z" in answer.text
    assert "W4001" in client.get("/partitions/0").text, "what is recorded there is not known"
    refused = client.get("/history")
    assert refused.status_code == 503
    assert "W4001 no ZooKeeper listens there" in refused.text


def test_a_look_that_saw_nothing_leaves_the_last_one_with_its_time() -> None:
    seen = replace(seen_of(well()), error=CannotConnect("all of it is away"), rates=None)
    html = browser(seen).get("/partitions").text
    assert "not seen since" in html
    assert "all of it is away" in html
    assert "server" in html


@pytest.mark.slow
def test_a_thousand_partitions_are_cut_by_the_server() -> None:
    snapshot = well(partitions=tuple(partition(number) for number in range(1000)))
    client = browser(seen_of(snapshot))
    numbers: list[str] = []
    path: str | None = "/partitions"
    while path is not None:
        answer = client.get(path)
        assert len(answer.content) < 200_000
        numbers += [row["partition"] for row in table_of(answer.text, "Partitions")]
        found = re.search(r'rel="next" href="([^"]+)"', answer.text)
        path = found[1].replace("&amp;", "&") if found else None
    assert numbers == [str(number) for number in range(1000)]
    assert "901 to 1,000 of 1,000" in client.get("/partitions?page=9").text
    assert table_of(client.get("/partitions?page=999").text, "Partitions")[0]["partition"] == "900"


@pytest.mark.slow
def test_archives_of_a_thousand_partitions_are_cut_too() -> None:
    snapshot = well(partitions=tuple(partition(number) for number in range(1000)))
    documents = asyncio.run(Cluster.create(MemoryTree().connect(), snapshot.meta))
    answer = browser(seen_of(snapshot), documents).get("/archive?page=9")
    assert len(answer.content) < 200_000
    for caption in ("How far archives reach", "What would be lost with all storages"):
        assert [row["partition"] for row in table_of(answer.text, caption)] == [str(number) for number in range(900, 1000)]
    assert 'rel="prev" href="/archive?page=8"' in answer.text


def test_partitions_that_want_something_alone_and_sorted() -> None:
    late = replace(replica("s2"), durable_id=0)
    there = [partition(number) for number in range(3)]
    down = replica("s3", counts=False, state="DOWN", story="gone")
    there[2] = partition(2, reported=owned(2, (replica("s1"), late, down)))
    client = browser(seen_of(well(partitions=tuple(there))))
    wanting = client.get("/partitions?show=wanting").text
    assert [row["partition"] for row in table_of(wanting, "Partitions")] == ["2"]
    assert "s2 99 behind" in wanting
    assert [row["partition"] for row in table_of(client.get("/partitions?sort=lag").text, "Partitions")] == ["2", "0", "1"]
    assert client.get("/partitions?sort=colour").status_code == 400


@pytest.mark.parametrize("number", ["4", "-1", "x", "99999999999999999999", "00000000009999"])
def test_a_partition_that_is_not_there(number: str) -> None:
    answer = browser(seen_of(well())).get(f"/partitions/{number}")
    assert answer.status_code == 404
    assert "W2102" in answer.text


@pytest.mark.parametrize("page", ["x", "-1", "1e3", "9" * 30, "٣"])
def test_a_number_that_is_none_is_refused_or_read(page: str) -> None:
    answer = browser(seen_of(well())).get("/partitions", params={"page": page})
    assert answer.status_code in (200, 400)
    assert answer.status_code == 400 or page == "٣"


def test_names_from_the_cluster_are_text() -> None:
    nasty = well(
        storages=(silent(storage(NASTY), CannotConnect(NASTY)), storage("s2"), storage("s3")),
        partitions=(partition(0, reported=owned(0, (replica(NASTY, story=NASTY),), waiting=NASTY)), partition(1)),
    )
    client = browser(seen_of(nasty))
    for path in LOOKING:
        html = client.get(path).text
        assert NASTY not in html
        assert path == "/servers" or "&lt;script&gt;" in html
    for path in (f"/partitions?sort={NASTY}", f"/{NASTY}", f"/transactions?lock={NASTY}", f"/events?level={NASTY}"):
        assert NASTY not in client.get(path).text


def test_history_and_archive_from_their_documents() -> None:
    async def documents() -> Cluster:
        found = await Cluster.create(MemoryTree().connect(), well().meta)
        entry = HistoryEntry(
            began="2026-11-24T10:00:00+00:00", ended=None, who=NASTY, verb="server drain", subject="a", reason=None,
            steps=("a step",), outcome="begun",
        )  # fmt: skip
        number = await found.begin_history(entry)
        await found.end_history(number, replace(entry, outcome="W4001 away", ended="2026-11-24T10:00:01+00:00"))
        return found

    client = browser(seen_of(well()), asyncio.run(documents()))
    text = client.get("/history").text
    assert "server drain a" in text
    assert '<span class="state bad"><span aria-hidden="true">■</span> W4001 away</span>' in text
    assert NASTY not in text
    rows = table_of(client.get("/archive").text, "How far archives reach")
    assert [(row["partition"], row["committed"], row["behind"]) for row in rows] == [
        (str(number), "99", "100") for number in range(4)
    ]
    reported = well().partitions[0].reported
    assert reported is not None
    kept = replace(reported, backed_up=BackedUp(last_id=97, moment=1_800_000_000_000_000), backup_lag_ms=4_500)
    snapshot = well(partitions=(replace(well().partitions[0], reported=kept), *well().partitions[1:]))
    text = browser(seen_of(snapshot), asyncio.run(documents())).get("/archive").text
    commands = [html.unescape(one) for one in re.findall(r"<code[^>]*>waltzctl ([^<]*)</code>", text)]
    assert [one.partition(" --directory")[0] for one in commands] == ["archive status", "archive status --lost-now"]
    assert [complaint(one) for one in commands if complaint(one)] == []
    row = table_of(text, "What would be lost with all storages")[0]
    assert (row["backed_up_to"], row["lost_transactions"], row["lost_seconds"]) == ("97", "2", "4.5")
    assert "2027-01-15" in text
    assert "Documents of the cluster: no leader says that they are saved" in text


def test_entries_are_named_once_and_lead_to_pages() -> None:
    paths = [entry.path for entry in ENTRIES]
    assert len(paths) == len(set(paths))
    html = browser(seen_of(well())).get("/").text
    nav = html.partition('aria-label="Pages"')[2].partition("</nav>")[0]
    assert re.findall(r'href="([^"]+)"', nav) == [entry.path for entry in ENTRIES if entry.name]
    assert nav.count("aria-current") == 1


# -- following ---------------------------------------------------------------------------------------------------------


def test_only_parts_that_have_changed_are_sent() -> None:
    seen = seen_of(well())
    ill = seen_of(well(storages=(silent(storage("s1"), CannotConnect("gone")), storage("s2"), storage("s3"))))

    async def follow() -> list[str]:
        watch = Still(seen)
        site = Site(watch, SessionAuth(hosts=hosts_of("127.0.0.1", 8765)))
        visiting(site)
        entry = next(entry for entry in ENTRIES if entry.path == "/")
        request = Request(
            {
                "type": "http",
                "method": "GET",
                "path": "/",
                "query_string": b"",
                "headers": [(b"cookie", f"{site.cookie}=cookie".encode())],
            }
        )
        told = site.follow(entry, request)
        got = [await anext(told), await anext(told)]
        for number, found in enumerate((seen, ill), 2):
            waiting = asyncio.ensure_future(anext(told))
            await asyncio.sleep(0)
            await watch.publish(replace(found, number=number))
            got.append(await waiting)
        watch.end()
        got += [one async for one in told]
        return got

    retry, whole, quiet, changed = asyncio.run(follow())
    assert retry.startswith("retry:")
    assert set(json.loads(whole.removeprefix("data: "))) == {"head", "verdict", "figures", "doctor"}
    assert quiet == ": quiet\n\n"
    assert "DEGRADED" in json.loads(changed.removeprefix("data: "))["head"]


def test_the_package_ships_what_pages_are_made_of() -> None:
    import tomllib

    root = Path(__file__).parents[4]
    shipped = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["waltzctl"]
    there = {path for pattern in shipped for path in (root / "waltzctl").glob(pattern)}
    folders = [root / "waltzctl/console" / name for name in ("templates", "static")]
    schemas = root / "waltzctl" / "show" / "schemas.json"
    assert there == {schemas, *(path for folder in folders for path in folder.iterdir())}


def opened() -> tuple[SessionAuth, list[str]]:
    tokens: list[str] = []
    auth = SessionAuth(hosts=hosts_of("127.0.0.1", 8765), report=tokens.append)
    auth.begin()
    return auth, tokens


def test_a_token_opens_once_and_the_next_one_is_told() -> None:
    auth, tokens = opened()
    first = auth.enter(tokens[0])
    assert first is not None
    assert auth.enter(tokens[0]) is None
    assert len(tokens) == 2
    assert auth.enter(tokens[1]) is not None
    assert auth.session(first.cookie, first.place) == first
    assert auth.session(first.cookie, "") is None
    assert len({*tokens, first.cookie, first.place}) == len(tokens) + 2


@pytest.mark.parametrize("token", ["", "x", "ü"])
def test_nothing_else_opens(token: str) -> None:
    auth, tokens = opened()
    assert auth.enter(token) is None
    assert auth.session(token, "") is None
    assert len(tokens) == 1, "a wrong one does not use the token up"
    assert SessionAuth(hosts=frozenset()).enter("") is None, "before there is a token, nothing is one"


def test_sessions_are_bounded_and_the_one_that_asked_last_stays() -> None:
    auth, tokens = opened()
    first = auth.enter(tokens[-1])
    assert first is not None
    for _ in range(2 * SESSIONS_MAX):
        assert auth.enter(tokens[-1]) is not None
        assert auth.session(first.cookie, first.place) == first
    assert len(auth._sessions) == SESSIONS_MAX


@pytest.mark.parametrize(
    ("host", "known", "foreign"),
    [
        (
            "127.0.0.1",
            ["127.0.0.1:1", "localhost:1", "LOCALHOST:1", "[::1]:1"],
            ["127.0.0.1", "127.0.0.1:2", "evil.example:1"],
        ),
        ("::1", ["[::1]:1", "localhost:1"], ["::1:1"]),
        ("console.example", ["console.example:1"], ["localhost:1", "127.0.0.1:1", "console.example"]),
    ],
)
def test_names_of_the_console(host: str, known: list[str], foreign: list[str]) -> None:
    auth = SessionAuth(hosts=hosts_of(host, 1))
    assert all(map(auth.is_known, known))
    assert not any(map(auth.is_known, foreign))


def test_a_port_that_browsers_leave_out() -> None:
    assert SessionAuth(hosts=hosts_of("console.example", 443)).is_known("console.example")

"""Changes by a browser: what is shown, what has to be typed, what is done and written down."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.unit.pictures import well
from tests.unit.waltzctl.console.still import HOST, REACH, Still, named, seen_of
from waltzctl.console import changes
from waltzctl.console.changes import WORKS_MAX, Verb, Works, mark_of, prepared
from waltzctl.console.door import Door, hosts_of
from waltzctl.console.site import Site
from waltzctl.shell.change import Asked as Agreed
from waltzctl.shell.change import Change, Request
from waltzctl.shell.progress import Amount, Say
from waltzctl.shell.safety import Danger, Effect, Margin, Plan
from waltzd.cluster.cluster import Cluster
from waltzd.cluster.memory import MemoryTree
from waltzd.errors import CannotConnect
from waltzd.protocol.role import Role

PLAN = Plan(verb="server drain", subject="server-1", steps=("server-1 takes no partitions any more",), danger=Danger.TYPED)
HARMFUL = Effect(before=Margin(partition=3, members=3, level=2), after=Margin(partition=3, members=3, level=1))
ADDRESS = "/change/trial?thing=server-1"


class Trial:
    """A verb whose plan a test sets, and what was done."""

    def __init__(self) -> None:
        self.plan = PLAN
        self.done: list[str] = []
        self.work: Callable[[Say], Awaitable[Mapping[str, Any]]] | None = None

    def call(self, given: Mapping[str, str], request: Request) -> int:
        async def prepare(_cluster: Cluster) -> Change:
            async def do(_cluster: Cluster, say: Say) -> Mapping[str, Any]:
                self.done.append(given["thing"])
                return {} if self.work is None else await self.work(say)

            return Change(plan=self.plan, do=do)

        return request.perform(prepare)


@pytest.fixture
def trial(monkeypatch: pytest.MonkeyPatch) -> Trial:
    found = Trial()
    verb = Verb(words="server drain", needs=("thing",), call=found.call, typed=lambda given: [given["thing"]])
    monkeypatch.setitem(changes.VERBS, "trial", verb)
    return found


@pytest.fixture
def documents() -> Cluster:
    return asyncio.run(Cluster.create(MemoryTree().connect(), well().meta))


class Visit:
    """A browser that is in, at a console that may change something unless it is told otherwise."""

    def __init__(
        self,
        documents: Cluster | None,
        *,
        allows_changes: bool = True,
        is_protected: bool = False,
        role: Role = Role.OPERATOR,
    ) -> None:
        watch = Still(seen_of(well()), documents)
        watch.reach = replace(REACH, is_protected=is_protected)
        door = Door(hosts=hosts_of("127.0.0.1", 8765), is_open=True)
        self.site = Site(watch, door, allows_changes=allows_changes)
        self.client = TestClient(named(self.site.app, role), base_url=f"http://{HOST}")
        self.client.get("/")

    def form(self) -> dict[str, str]:
        html = self.client.get(ADDRESS).text
        return dict(re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)">', html))

    def send(self, said: Mapping[str, str], **headers: str) -> Any:
        return self.client.post("/change/trial", data=dict(said), headers=headers, follow_redirects=False)


def test_a_plan_is_shown_and_done_when_its_name_was_typed(trial: Trial, documents: Cluster) -> None:
    visit = Visit(documents)
    with visit.client:  # one loop for all of it, on which the work goes on
        html = visit.client.get(ADDRESS).text
        assert "server-1 takes no partitions any more" in html
        assert "Type <b>server-1</b>" in html
        assert "waltzctl server drain server-1 --dry-run" in html
        answer = visit.send(visit.form() | {"confirm": "server-1", "reason": "new <b>memory</b>"})
        assert (answer.status_code, answer.headers["location"]) == (303, "/changes")
        html = visit.client.get("/changes").text
        while "begun" in html:
            html = visit.client.get("/changes").text
        assert trial.done == ["server-1"]
        html = visit.client.get("/history").text
        assert "server drain server-1" in html
        assert "new &lt;b&gt;memory&lt;/b&gt;; by ann in the console" in html


@pytest.mark.parametrize("typed", ["", "server-2", "SERVER-1", "yes"])
def test_nothing_is_done_for_another_name(trial: Trial, documents: Cluster, typed: str) -> None:
    visit = Visit(documents)
    answer = visit.send(visit.form() | {"confirm": typed})
    assert answer.status_code == 400
    assert "W2101 The name that was typed is not server-1" in answer.text
    assert trial.done == []


def test_a_protected_cluster_wants_its_own_name(trial: Trial, documents: Cluster) -> None:
    visit = Visit(documents, is_protected=True)
    assert visit.send(visit.form() | {"confirm": REACH.name}).status_code == 400, "what is dangerous has a name of its own"
    trial.plan = replace(PLAN, danger=Danger.ASK)
    assert visit.send(visit.form() | {"confirm": "server-1"}).status_code == 400
    assert visit.send(visit.form() | {"confirm": REACH.name}).status_code == 303


def test_a_plan_that_came_out_otherwise_is_shown_again(trial: Trial, documents: Cluster) -> None:
    visit = Visit(documents)
    form = visit.form()
    trial.plan = replace(PLAN, steps=("something else",))
    answer = visit.send(form | {"confirm": "server-1"})
    assert answer.status_code == 400
    assert "The plan has changed since it was shown" in answer.text
    assert "something else" in answer.text
    assert trial.done == []
    assert visit.send(visit.form() | {"confirm": "server-1"}).status_code == 303


def test_what_is_unsafe_stays_refused(trial: Trial, documents: Cluster) -> None:
    trial.plan = replace(PLAN, margins=(HARMFUL,))
    visit = Visit(documents)
    html = visit.client.get(ADDRESS).text
    assert "partition 3 would have 1 of 3 members level" in html
    assert "<form" not in html
    secret = visit.site.door.session(visit.client.cookies[visit.site.cookie])
    assert secret is not None
    said = {"secret": secret.form, "thing": "server-1", "mark": mark_of(trial.plan), "confirm": "server-1"}
    answer = visit.send(said)
    assert answer.status_code != 303
    assert "W2100" in answer.text or "would have" in answer.text
    assert trial.done == []


def test_what_is_so_already_is_no_question(trial: Trial, documents: Cluster) -> None:
    trial.plan = replace(PLAN, steps=())
    visit = Visit(documents)
    html = visit.client.get(ADDRESS).text
    assert "There is nothing to do" in html
    assert "<form" not in html


def test_a_form_of_another_site_changes_nothing(trial: Trial, documents: Cluster) -> None:
    visit = Visit(documents)
    form = visit.form() | {"confirm": "server-1"}
    for said, headers in (
        (form | {"secret": "guessed"}, {}),
        ({name: value for name, value in form.items() if name != "secret"}, {}),
        (form, {"origin": "http://evil.example"}),
        (form, {"sec-fetch-site": "cross-site"}),
    ):
        answer = visit.send(said, **headers)
        assert answer.status_code == 403
        assert "W2322" in answer.text
    stranger = TestClient(named(visit.site.app), base_url=f"http://{HOST}").post("/change/trial", data=form)
    assert "W2322" in stranger.text, "its secret is that of another browser"
    assert trial.done == []
    assert visit.send(form, origin=f"http://{HOST}").status_code == 303


def test_a_console_that_looks_has_no_plans_and_takes_no_form(trial: Trial, documents: Cluster) -> None:
    form = Visit(documents).form()
    visit = Visit(documents, allows_changes=False)
    for path in (ADDRESS, "/changes"):
        answer = visit.client.get(path)
        assert answer.status_code == 403
        assert "W2323" in answer.text
    session = visit.site.door.session(visit.client.cookies[visit.site.cookie])
    assert session is not None
    answer = visit.send(form | {"secret": session.form, "confirm": "server-1"})
    assert answer.status_code == 403
    assert "W2323" in answer.text
    assert trial.done == []
    for path in ("/servers", "/partitions/0"):
        assert "/change/" not in visit.client.get(path).text
        assert "/change/" in Visit(documents).client.get(path).text


def test_the_browser_of_an_observer_looks(trial: Trial, documents: Cluster) -> None:
    form = Visit(documents).form()
    visit = Visit(documents, role=Role.OBSERVER)
    assert visit.client.get("/servers").status_code == 200
    session = visit.site.door.session(visit.client.cookies[visit.site.cookie])
    assert session is not None
    for answer in (
        visit.client.get(ADDRESS),
        visit.client.get("/transactions"),
        visit.send(form | {"secret": session.form, "confirm": "server-1"}),
    ):
        assert answer.status_code == 403
        assert "W2024 the certificate of ann has the role observer" in answer.text
    assert trial.done == []


@pytest.mark.parametrize("query", ["", "thing=", "thing=--yes", "thing=a%0Ab", f"thing={'x' * 1000}"])
def test_what_a_change_is_told_is_a_word(trial: Trial, documents: Cluster, query: str) -> None:
    assert Visit(documents).client.get(f"/change/trial?{query}").status_code == 400


def test_no_such_change(documents: Cluster) -> None:
    answer = Visit(documents).client.get("/change/cluster-delete?thing=1")
    assert answer.status_code == 404
    assert "W2102" in answer.text


def test_without_zookeeper_nothing_is_planned(trial: Trial) -> None:
    answer = Visit(None).client.get(ADDRESS)
    assert answer.status_code == 503
    assert "W4001" in answer.text


def test_works_say_what_they_do_and_end_with_the_console(trial: Trial, documents: Cluster) -> None:
    async def work() -> None:
        works = Works()
        prepare = prepared(changes.VERBS["trial"], {"thing": "server-1"}, REACH)
        change, agreed = await prepare(documents), Agreed(confirm="server-1")
        saying, never = asyncio.Event(), asyncio.Event()

        async def slow(say: Say) -> Mapping[str, Any]:
            say("copying", Amount(done=1, total=4, unit="bytes"))
            saying.set()
            await never.wait()
            return {}

        async def failing(_say: Say) -> Mapping[str, Any]:
            raise CannotConnect("it went away")

        trial.work = slow
        going = works.begin(documents, change, prepare, agreed, REACH)
        await saying.wait()
        assert (going.outcome, going.says) == ("begun", "25 %; copying")
        trial.work = failing
        for _ in range(WORKS_MAX + 5):
            failed = works.begin(documents, change, prepare, agreed, REACH)
            assert failed.task is not None
            await failed.task
        assert (failed.outcome, failed.says.partition("\n")[0][:18]) == ("W4001", "W4001 it went away")
        assert len(works.all) <= WORKS_MAX + 1
        assert going in works.all, "what goes on is never forgotten"
        await works.end()
        assert going.outcome == "interrupted"
        outcomes = [entry.outcome for _, entry in await documents.history(1000)]
        assert outcomes.count("interrupted") == 1

    asyncio.run(work())

"""The comparison with other systems, without their servers: what is counted, told, and left out by name."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tests.bench.peers.command import SYSTEMS, choose, flush_seconds, parsed
from tests.bench.peers.floor import Floor, FloorSession
from tests.bench.peers.jetstream import JetStreamSession
from tests.bench.peers.load import CLIENTS, MANY, ONE, SESSIONS, WORKLOADS, Measurement, PeerLoad, Plan, Window
from tests.bench.peers.process import Process, cpu_seconds, family_of, undisturbed
from tests.bench.peers.report import NOTHING, Row, facts_of, rows_of, text_of
from tests.bench.peers.system import LANES, LANES_MANY, Facts, find_program, missing_of, until_it_works
from tests.unit import timeless
from waltzctl.bench.command import filesystem_of
from waltzctl.local_cluster.daemon import birth
from waltzctl.shell.blueprint import free_ports

PLAN = Plan(system="waltz", address=("a", "b"), pids=(), sizes=(16, 300), seconds=2.0, warm_seconds=1.0, in_flight=80)
ROUND_TRIP_SECONDS = 0.01


class Ledger:
    """A system in memory. It insists that no slot has two transactions in flight, because then they could conflict."""

    def __init__(self, *, forgets: int = 0) -> None:
        self.forgets = forgets
        self.busy: set[int] = set()
        self.count = 0
        self.sizes: Counter[int] = Counter()
        self.together: Counter[int] = Counter()
        self.is_open = False

    async def open(self) -> None:
        self.is_open = True

    async def append(self, slot: int, payload: bytes) -> None:
        await self._take([slot], payload)

    async def append_all(self, lane: int, slots: range, payload: bytes) -> None:
        assert 0 <= lane < LANES_MANY
        await self._take(slots, payload)

    async def _take(self, slots: range | list[int], payload: bytes) -> None:
        assert self.is_open
        assert not self.busy & set(slots)
        self.busy.update(slots)
        self.together[len(self.busy)] += 1
        await asyncio.sleep(ROUND_TRIP_SECONDS)
        self.busy.difference_update(slots)
        self.count += len(slots)
        self.sizes[len(payload)] += len(slots)

    async def kept(self) -> int:
        return self.count - self.forgets

    async def close(self) -> None:
        self.is_open = False


def load(ledger: Ledger) -> list[Measurement]:
    found: list[Measurement] = []
    timeless.run(PeerLoad(PLAN, ledger).run(found.append))
    return found


# -- the load


@pytest.mark.slow
def test_every_workload_is_measured_with_every_size_and_no_slot_is_used_twice_at_a_time() -> None:
    ledger = Ledger()
    found = load(ledger)
    assert [(one.size, one.workload) for one in found] == [
        (size, workload) for size in PLAN.sizes for workload in WORKLOADS
    ]
    assert max(ledger.together) == max(LANES, PLAN.in_flight)
    assert set(ledger.sizes) == set(PLAN.sizes)
    assert not ledger.is_open


@pytest.mark.slow
def test_what_counts_is_inside_the_window_and_all_of_it_has_to_be_kept() -> None:
    ledger = Ledger()
    found = load(ledger)
    round_trips = round(PLAN.seconds / ROUND_TRIP_SECONDS)
    for one in found:
        in_flight = {ONE: 1, CLIENTS: LANES, MANY: PLAN.in_flight}[one.workload]
        assert abs(one.count - round_trips * in_flight) <= in_flight
        assert one.missing == 0
    assert found[-1].acknowledged == ledger.count > sum(one.count for one in found)


@pytest.mark.slow
def test_what_the_servers_do_not_hold_is_missing() -> None:
    assert {one.missing for one in load(Ledger(forgets=3))} == {3}


def test_a_window_counts_between_its_ends() -> None:
    window = Window()
    window.done(5, 9.0)
    window.begin(10.0, 100.0, 1.0)
    window.done(30, 0.001)
    window.done(10, 0.003)
    window.end(12.0, 100.5, 1.25)
    window.done(7, 9.0)
    one = window.measured(CLIENTS, 16, acknowledged=window.acknowledged, kept=52)
    assert (one.count, one.seconds, one.rate, one.acknowledged, one.missing) == (40, 2.0, 20.0, 52, 0)
    assert (one.server_cpu, one.client_cpu) == (0.5, 0.25)
    assert one.p50 == pytest.approx(0.001, rel=0.01)
    assert one.p99 == pytest.approx(0.003, rel=0.01)
    many = window.measured(MANY, 16, acknowledged=52, kept=52)
    assert (many.p50, many.p99) == (0.0, 0.0)


def test_plans_and_measurements_survive_the_way_between_the_processes() -> None:
    assert Plan.from_json(json.dumps(asdict(PLAN))) == PLAN
    assert Measurement.from_json(json.dumps(asdict(measured()))) == measured()


def test_waiting_for_servers_ends_with_the_last_refusal() -> None:
    refusals = iter([LookupError("not yet")] * 3)

    async def attempt() -> str:
        for refusal in refusals:
            raise refusal
        return "here"

    async def never() -> None:
        raise LookupError("no leader")

    assert timeless.run(until_it_works("it", attempt, LookupError)) == "here"
    with pytest.raises(TimeoutError, match=r"it: not within 60 seconds: .*no leader"):
        timeless.run(until_it_works("it", never, LookupError))


# -- the report


def measured(rate: int = 1000, workload: str = CLIENTS, kept: int | None = None) -> Measurement:
    acknowledged = 3 * rate
    return Measurement(
        workload=workload,
        size=512,
        count=2 * rate,
        seconds=2.0,
        p50=0.004,
        p99=0.009,
        server_cpu=0.5,
        client_cpu=0.25,
        acknowledged=acknowledged,
        kept=acknowledged if kept is None else kept,
    )


def rows(*rounds: dict[str, Measurement]) -> dict[str, Row]:
    return {row.system: row for row in rows_of([{name: [one] for name, one in each.items()} for each in rounds])}


def test_a_row_has_medians_and_the_median_of_the_ratios_of_the_rounds() -> None:
    found = rows(
        {"waltz": measured(1000), "etcd": measured(500)},
        {"waltz": measured(4000), "etcd": measured(400)},
        {"waltz": measured(3000), "etcd": measured(1000)},
    )
    assert (found["waltz"].rate, found["waltz"].ratio) == (3000, None)
    assert (found["etcd"].rate, found["etcd"].ratio, found["etcd"].rounds) == (500, 3.0, 3)
    assert (found["etcd"].p50_ms, found["etcd"].p99_ms) == (4.0, 9.0)
    assert (found["etcd"].server_us, found["etcd"].client_us) == (500.0, 250.0)


def test_rows_come_in_the_order_of_the_measurements_and_say_no_latency_of_many_in_flight() -> None:
    here = [measured(workload=workload) for workload in WORKLOADS]
    found = rows_of([{"waltz": here, "redis": here}])
    assert [(row.workload, row.system) for row in found] == [
        (workload, system) for workload in WORKLOADS for system in ("waltz", "redis")
    ]
    assert [row.p50_ms is None for row in found] == [False] * 4 + [True] * 2


def test_a_round_that_failed_is_left_out_of_both_sides() -> None:
    found = rows({"waltz": measured(9000)}, {"waltz": measured(1000), "etcd": measured(500)})
    assert (found["etcd"].rounds, found["etcd"].ratio, found["waltz"].rate) == (1, 2.0, 5000)


def test_without_waltz_there_is_no_ratio() -> None:
    assert rows({"etcd": measured()})["etcd"].ratio is None


@pytest.mark.parametrize(
    ("kept", "told"),
    [(2990, "acknowledged 3000, kept 2990: 10 are missing"), (3001, "acknowledged 3000, kept 3001: 1 too many")],
)
def test_what_was_not_kept_exactly_is_shown_and_no_figure(kept: int, told: str) -> None:
    found = rows({"waltz": measured(), "redis": measured()}, {"waltz": measured(), "redis": measured(kept=kept)})
    row = found["redis"]
    assert (row.rate, row.ratio, row.difference) == (None, None, told)
    line = text_of([row]).splitlines()[1]
    assert line.startswith(CLIENTS)
    assert line.endswith(f"redis  {told}")


def test_what_waltz_did_not_keep_is_not_compared_with() -> None:
    assert rows({"waltz": measured(kept=1), "etcd": measured()})["etcd"].ratio is None


def test_an_empty_window_is_no_figure() -> None:
    found = rows({"waltz": measured(), "etcd": replace(measured(), count=0)})
    assert found["etcd"].difference == "nothing was acknowledged inside the window"


def test_the_table_and_the_facts_as_text() -> None:
    table = text_of(list(rows({"waltz": measured(12000), "etcd": measured(4000)}).values())).splitlines()
    assert [line.split()[-1] for line in table[1:]] == [NOTHING, "3.00"]
    assert "12,000" in table[1]
    assert len({len(line) for line in table[1:]}) == 1
    assert facts_of({"etcd": Facts("3.4", "flushed", "a store")}) == "etcd 3.4: flushed.\n  Beside it: a store."


# -- what is here and what is not


def test_every_system_has_a_session() -> None:
    assert set(SYSTEMS) == set(SESSIONS)


def test_a_missing_program_is_skipped_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    chosen, skipped = choose(("etcd",), SYSTEMS)
    assert chosen == []
    assert skipped == ["etcd is skipped: the program etcd is not here. To have it: apt-get install etcd-server"]
    program = tmp_path / "etcd"
    program.write_text("#!/bin/sh\n", encoding="utf-8")
    program.chmod(0o755)
    assert choose(("etcd",), SYSTEMS) == ([SYSTEMS["etcd"]], [])


def test_a_program_of_this_environment_is_found_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "python"
    other.write_text("#!/bin/sh\n", encoding="utf-8")
    other.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_program("python") == Path(sys.prefix) / "bin" / "python"


def test_a_missing_package_is_named_too() -> None:
    assert missing_of([], ["json", "no_such_client"]) == "the Python package no_such_client"
    assert missing_of([], ["json"]) is None


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--peers", "waltz,kafka"], "there is no kafka"),
        (["--rounds", "0"], "0 is less than 1"),
        (["--seconds", "nan"], "nan is less than 0.1"),
        (["--in-flight", "100"], "100 is not a multiple of 8"),
        (["--sizes", "12,0"], "0 is less than 1"),
        (["--json", "no-such-folder/out.json"], "no-such-folder is no directory"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_started(
    words: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parsed(words)
    assert reason in capsys.readouterr().err


def test_options(tmp_path: Path) -> None:
    options = parsed(["--peers", "redis,waltz,redis", "--sizes", "128", "--json", str(tmp_path / "out.json")])
    assert isinstance(options, argparse.Namespace)
    assert (options.peers, options.sizes, options.rounds) == (("redis", "waltz"), (128,), 5)


def test_a_message_that_came_too_soon_is_sent_again_and_a_conflict_is_not() -> None:
    pytest.importorskip("nats", reason="the Python package nats-py is not installed")
    from nats.js.api import PubAck
    from nats.js.errors import BadRequestError

    session = JetStreamSession(("nats://nowhere",))
    assert not session._is_taken(3, BadRequestError(code=400, err_code=10164, description="wrong last sequence"))
    with pytest.raises(BadRequestError):
        session._is_taken(3, BadRequestError(code=400, err_code=10071, description="wrong last sequence: 7"))
    assert session._is_taken(3, PubAck(stream="LOAD", seq=9, domain=None, duplicate=None))
    assert session._expected(3) == {"Nats-Expected-Last-Subject-Sequence": "9"}


@pytest.mark.slow
def test_the_floor_keeps_what_it_acknowledges(tmp_path: Path) -> None:
    floor = Floor(tmp_path, free_ports(2))

    async def load() -> int:
        session = FloorSession(floor.address)
        await session.open()
        try:
            await asyncio.gather(*[session.append(slot, b"a" * 512) for slot in range(20)])
            await session.append_all(0, range(30), b"b" * 128)
            return await session.kept()
        finally:
            await session.close()

    try:
        floor.start()
        assert asyncio.run(load()) == 50
    finally:
        floor.stop()
    sizes = [path.stat().st_size for path in tmp_path.glob("*.data")]
    assert len(sizes) == 3
    assert sorted(sizes)[1] >= 20 * 512 + 30 * 128


# -- processes


def test_a_family_is_everybody_that_was_started_and_its_cpu_is_counted() -> None:
    busy = "import sys, time\nwhile time.process_time() < 0.2: pass\nprint('here', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", busy]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdout.readline()
    assert child.pid in family_of([os.getpid()])
    assert family_of([child.pid]) == [child.pid]
    assert cpu_seconds([os.getpid()]) > cpu_seconds([child.pid]) > 0
    child.communicate()
    assert cpu_seconds([child.pid]) == 0


def test_a_program_that_does_not_start_is_quoted(tmp_path: Path) -> None:
    process = Process("broken", [sys.executable, "-c", "raise SystemExit('no room')"], tmp_path, port=next(free_ports(1)))
    process.start()
    with pytest.raises(RuntimeError, match="broken did not start: no room"):
        process.wait_listening()
    process.stop()


def test_a_program_that_does_not_want_to_end_is_ended_with_its_children(tmp_path: Path) -> None:
    body = "import os, signal; signal.signal(15, signal.SIG_IGN); os.fork(); print(os.getpid(), flush=True); signal.pause()"
    process = Process("stubborn", [sys.executable, "-c", body], tmp_path, port=9, ending=signal.SIGTERM, end_seconds=0.1)
    process.start()
    while len(pids := [int(word) for word in process.last_words().split()]) < 2:
        assert family_of([process.pid])
    process.stop()
    assert process.pid in pids
    deadline = time.monotonic() + 30
    while any(birth(pid) for pid in pids):
        assert time.monotonic() < deadline


def test_an_interruption_waits_until_what_was_begun_is_over() -> None:
    finished = []

    def begun() -> None:
        with undisturbed():
            signal.raise_signal(signal.SIGINT)
            finished.append("this")

    with pytest.raises(KeyboardInterrupt):
        begun()
    assert finished == ["this"]


def test_the_machine_is_described(tmp_path: Path) -> None:
    assert min(flush_seconds(tmp_path)) > 0
    assert list(tmp_path.iterdir()) == []
    assert filesystem_of(Path("/proc")) == "proc"

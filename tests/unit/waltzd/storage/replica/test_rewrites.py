"""What of an append is new, against a twin that looks at one record at a time."""

from __future__ import annotations

import random

import pytest

from tests.tiers import together
from waltzd.errors.operations import Diverged, NotNextId
from waltzd.format.record import Run, encode_payloads
from waltzd.storage.replica.writer import only_new


def records(runs: list[Run]) -> list[tuple[int, bytes]]:
    return [(run.first_id + i, bytes(run.data[run.bounds[i] : run.bounds[i + 1]])) for run in runs for i in range(len(run))]


def twin(runs: list[Run], log: list[bytes]) -> list[tuple[int, bytes]] | type[Exception]:
    grown = list(log)
    for id_, raw in records(runs):
        if id_ > len(grown):
            return NotNextId
        if id_ < len(grown) and grown[id_] != raw:
            return Diverged
        if id_ == len(grown):
            grown.append(raw)
    return list(enumerate(grown))[len(log) :]


@together("seed", range(300), quick=60)
def test_it_keeps_what_is_new_and_refuses_what_differs(seed: int) -> None:
    pick = random.Random(seed)
    history = [str(i).encode() * pick.randrange(1, 4) for i in range(40)]
    stored = encode_payloads(0, history[: pick.randrange(20)])
    runs: list[Run] = []
    at = len(stored)
    for _ in range(pick.randrange(1, 6)):
        first = max(0, at - pick.choice([0, 0, 1, 3, 9]) + (pick.random() < 0.03))
        payloads = history[first : first + pick.randrange(1, 8)]
        if pick.random() < 0.1:
            payloads[pick.randrange(len(payloads))] = b"another history"
        runs.append(encode_payloads(first, payloads))
        at = max(at, runs[-1].last_id + 1)

    def read(first_id: int, last_id: int, bytes_max: int) -> Run:
        assert 0 <= first_id <= last_id < len(stored)
        return stored.part(first_id, min(last_id, first_id + pick.randrange(3)) + 1)

    def call() -> list[Run]:
        return only_new(runs, partition=0, last_id=len(stored) - 1, stored=read)

    want = twin(runs, [raw for _, raw in records([stored])])
    if isinstance(want, type):  # a run is looked at whole: of two things that are wrong, either may be named
        with pytest.raises((NotNextId, Diverged)):
            call()
    else:
        assert records(call()) == want

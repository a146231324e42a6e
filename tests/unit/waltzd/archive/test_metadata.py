"""The documents of a cluster in an archive: a number for each change, whatever becomes of an answer."""

from __future__ import annotations

import random

from tests.simulation.faulty_store import Faults, FaultyStore
from tests.tiers import together
from waltzd.archive.listing import metadata_at, metadata_in, newest_metadata, number_of, save_metadata
from waltzd.errors.operations import StoreUnavailable


def test_each_change_has_a_number() -> None:
    store = FaultyStore()
    assert newest_metadata(store) is None
    assert [save_metadata(store, text) for text in (b"one", b"one", b"two", b"one")] == [1, 1, 2, 3]
    assert newest_metadata(store) == (3, b"one")
    assert [number_of(one.name) for one in metadata_in(store)] == [1, 2, 3]
    assert metadata_at(store, 2) == b"two"
    assert number_of("metadata/0000000001.json.gz") is None


def test_a_list_that_lags_hides_nothing() -> None:
    store = FaultyStore(faults=Faults(lag=100))
    for number in range(1, 5):
        assert save_metadata(store, b"%d" % number) == number
    assert newest_metadata(store) == (4, b"4")


@together("seed", range(20))
def test_a_lost_answer_makes_no_second_number(seed: int) -> None:
    store = FaultyStore(random.Random(seed), Faults(lost=30, refused=20, repeated=30))
    for number in range(1, 6):
        while True:
            try:
                assert save_metadata(store, b"text %d" % number) == number
                break
            except StoreUnavailable:
                continue
    store.faults = Faults()
    assert newest_metadata(store) == (5, b"text 5")

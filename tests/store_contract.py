"""What every store of objects keeps, whatever stands behind it: one list of stories, run on each adapter."""

from __future__ import annotations

import threading

import pytest

from tests.unit.waltzd.archive.test_unsealed_writer import Room
from waltzd.archive.store import Store, read_object
from waltzd.errors.operations import ObjectAbsent, ObjectExists, StoreRefused


class StoreContract:
    """Subclasses give the fixture `store`: an empty one."""

    def test_what_was_written_is_read(self, store: Store) -> None:
        tag = store.put_new("a/b.seg", memoryview(b"hello"))
        assert store.get_range("a/b.seg", 0, 100) == b"hello"
        assert store.get_range("a/b.seg", 1, 3) == b"ell"
        assert store.get_range("a/b.seg", 3, 100) == b"lo"
        assert store.get_range("a/b.seg", 0, 0) == b""
        assert store.get_range("a/b.seg", 5, 1) == b""
        assert store.get_range("a/b.seg", 9, 1) == b""
        found = store.head("a/b.seg")
        assert (found.name, found.size, found.tag) == ("a/b.seg", 5, tag)

    def test_an_empty_object_is_one(self, store: Store) -> None:
        store.put_new("empty", b"")
        assert (store.head("empty").size, store.get_range("empty", 0, 10)) == (0, b"")

    def test_nothing_is_written_over(self, store: Store) -> None:
        store.put_new("a", b"first")
        with pytest.raises(ObjectExists):
            store.put_new("a", b"second")
        assert store.get_range("a", 0, 100) == b"first"

    def test_what_is_replaced_is_the_one_that_was_meant(self, store: Store) -> None:
        first = store.put_new("a", b"first")
        second = store.put_if("a", b"second", first)
        assert second != first
        assert store.head("a").tag == second
        with pytest.raises(ObjectExists):
            store.put_if("a", b"third", first)
        with pytest.raises(ObjectAbsent):
            store.put_if("b", b"third", first)
        assert store.get_range("a", 0, 100) == b"second"

    def test_what_is_not_there_is_absent(self, store: Store) -> None:
        for ask in (store.head, lambda name: store.get_range(name, 0, 1)):
            with pytest.raises(ObjectAbsent):
                ask("a/b")

    def test_a_list_has_what_is_below_a_folder(self, store: Store) -> None:
        assert store.list("") == []
        for name in ("a/2", "a/1", "a/c/3", "ab", "b"):
            store.put_new(name, name.encode())
        assert [one.name for one in store.list("a")] == ["a/1", "a/2", "a/c/3"]
        assert [one.name for one in store.list("")] == ["a/1", "a/2", "a/c/3", "ab", "b"]
        assert store.list("nowhere") == []
        assert store.list("a")[0] == store.head("a/1")

    def test_what_was_removed_is_absent(self, store: Store) -> None:
        store.put_new("a/b", b"x")
        store.remove("a/b")
        store.remove("a/b")
        store.remove("c")
        with pytest.raises(ObjectAbsent):
            store.head("a/b")
        assert store.list("") == []

    def test_of_many_writers_one_wins(self, store: Store) -> None:
        won: list[bytes] = []

        def put(data: bytes) -> None:
            try:
                store.put_new("a/one", data)
            except ObjectExists:
                return
            won.append(data)

        threads = [threading.Thread(target=put, args=(bytes([number]),)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [store.get_range("a/one", 0, 9)] == won

    def test_an_object_beyond_the_limit_is_not_read(self, store: Store) -> None:
        store.put_new("a", b"12345")
        assert read_object(store, "a", 5) == b"12345"
        with pytest.raises(StoreRefused, match="has more than 4 bytes"):
            read_object(store, "a", 4)

    def test_a_tail_grows_in_it(self, store: Store) -> None:
        """Two storages in turn: each finds what the other has written, and writes over nothing that it has not read."""
        room = Room(store=store)  # type: ignore[arg-type]
        tails = room.tail(), room.tail()
        for turn, room.committed in enumerate(range(2, 48, 3)):
            room.back_up(tails[turn // 3 % 2])
            room.archive()
            room.check_whole()
        assert len(store.list("partition-0/tail")) <= 12

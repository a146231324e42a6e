"""A directory as a store: the contract, and what only a directory can meet."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from tests.store_contract import StoreContract
from waltzd.archive.local import LocalStore
from waltzd.archive.location import open_store
from waltzd.archive.store import Store, is_object_name
from waltzd.errors import BadArgument
from waltzd.errors.operations import ObjectExists, StoreRefused, StoreUnavailable


class TestContract(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return LocalStore(str(tmp_path))


def test_a_disk_that_is_not_mounted_is_no_empty_store(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path / "gone"))
    for ask in (lambda: store.list(""), lambda: store.head("a"), lambda: store.put_new("a", b"x")):
        with pytest.raises(StoreRefused, match="there is no directory"):
            ask()
    assert not (tmp_path / "gone").exists()


def test_nothing_is_left_of_what_was_not_written(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))
    store.put_new("a/b", b"x")
    with pytest.raises(StoreRefused):
        store.put_new("a/b/c", b"x")
    (tmp_path / "link").symlink_to(tmp_path / "a" / "b")
    with pytest.raises(StoreRefused):
        store.get_range("link", 0, 1)
    with pytest.raises(StoreRefused, match="not a plain file"):
        store.head("a")
    assert [one.name for one in store.list("")] == ["a/b"]
    assert os.listdir(tmp_path / ".new") == []


@pytest.mark.parametrize("kind", ["pipe", "directory", "socket"])
def test_what_is_no_plain_file_is_refused_and_nobody_waits_for_it(tmp_path: Path, kind: str) -> None:
    place = tmp_path / "tail.json"
    if kind == "pipe":
        os.mkfifo(place)
    elif kind == "directory":
        place.mkdir()
    else:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(str(place))
    store = LocalStore(str(tmp_path))

    def head() -> None:
        store.head("tail.json")

    for ask in (lambda: store.get_range("tail.json", 0, 10), head):
        with pytest.raises(StoreUnavailable if kind == "socket" and ask is not head else StoreRefused):
            ask()
    assert store.list("") == []


def test_what_a_killed_writer_left_unflushed_is_flushed_before_it_is_said_to_be_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a manifest could outlive a failing machine, and an object that it names could not."""
    folder = tmp_path / "partition-0" / "segment"
    folder.mkdir(parents=True)
    (folder / "a").write_bytes(b"x")
    flushed: list[Path] = []
    monkeypatch.setattr("waltzd.archive.local._flush_folder", flushed.append)
    store = LocalStore(str(tmp_path))
    with pytest.raises(ObjectExists):
        store.put_new("partition-0/segment/a", b"x")
    assert flushed == [folder, folder.parent, tmp_path]
    flushed.clear()
    store.put_new("partition-0/segment/b", b"x")
    assert flushed == [folder, folder.parent, tmp_path]


def test_what_killed_writers_left_is_found_a_day_later_and_nothing_else(tmp_path: Path) -> None:
    store, now = LocalStore(str(tmp_path)), 10_000_000.0
    assert store.leftovers(now) == []
    tag = store.put_new("a", b"x")
    store.put_if("a", b"y", tag)  # makes the lock
    for name, age in (("old", 90_000), ("new", 80_000), ("lock", 90_000)):
        (tmp_path / ".new" / name).write_bytes(b"half of it")
        os.utime(tmp_path / ".new" / name, (now - age, now - age))
    (left,) = store.leftovers(now)
    assert (left.name, left.size) == (".new/old", 10)
    store.remove_leftover(left)
    store.remove_leftover(left)
    assert sorted(os.listdir(tmp_path / ".new")) == ["lock", "new"]
    assert store.leftovers(now) == []


def test_a_full_disk_is_a_store_that_is_not_available_now() -> None:
    with pytest.raises(StoreUnavailable, match="No space left"), LocalStore("/x")._translated("a"):
        raise OSError(28, "full")


def test_hidden_files_and_others_are_no_objects(tmp_path: Path) -> None:
    for name in (".hidden", "with space"):
        (tmp_path / name).write_bytes(b"x")
    assert LocalStore(str(tmp_path)).list("") == []
    assert [is_object_name(name) for name in ("a/b-1_c.d", "", "/a", "a/", "a//b", "../a", "a/.b", "ä", "a" * 513)] == [
        True, *[False] * 8
    ]  # fmt: skip


def test_a_text_names_a_store(tmp_path: Path) -> None:
    assert open_store(str(tmp_path)).place == open_store(f"file://{tmp_path}").place == str(tmp_path)
    for text in ("ftp://host/x", "s3:///x", "file://elsewhere/x", "://"):
        with pytest.raises(BadArgument, match="names no store"):
            open_store(text)

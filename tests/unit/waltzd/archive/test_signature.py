"""Who can only write to the store of an archive cannot replace the log: a key that is not there signs what proves it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.store_contract import StoreContract
from tests.unit.waltzd.archive.test_upload import CLUSTER, segment
from waltzd.archive import manifest as manifests
from waltzd.archive.listing import metadata_at, newest_manifests, newest_metadata, save_metadata
from waltzd.archive.local import LocalStore
from waltzd.archive.manifest import LABEL, Label, Manifest
from waltzd.archive.signature import (
    LINE_BYTES,
    SignedStore,
    is_signed,
    new_key,
    read_key,
    sign_all,
    unsigned_among,
)
from waltzd.archive.store import Store, read_object
from waltzd.archive.upload import PartitionArchive, label_in
from waltzd.errors.operations import ArchiveDamaged, BadConfig, StoreRefused, UnsignedArchive
from waltzd.protocol.descriptions import Archived

OURS, THEIRS = bytes(range(32)), bytes(32)
FIRST, SECOND, THIRD = (f"partition-0/manifest/{number:010d}.json" for number in (1, 2, 3))


class TestContract(StoreContract):
    """It is a store like any other, also for names that it signs."""

    @pytest.fixture(params=[OURS, None], ids=["key", "no key"])
    def store(self, tmp_path: Path, request: pytest.FixtureRequest) -> Store:
        return SignedStore(LocalStore(str(tmp_path)), request.param)


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifests, "FAN_OUT", 2)


def archive_to(store: Store, segments: int, *, history: bytes = b"") -> Label:
    label = label_in(store, CLUSTER, lambda: CLUSTER, None)
    known = Archived()
    for number in range(segments):
        found = PartitionArchive(store, label, 0).add(known, *segment(number, history=history))
        known = Archived(archive=found.archive, number=found.number, sha256=found.sha256, last_id=found.last)
    save_metadata(store, b"documents\n")
    return label


def newest(store: Store) -> Manifest:
    label = Label.decode(read_object(store, LABEL, 1 << 20), LABEL)
    return newest_manifests(store, label)[0]


def test_what_is_signed_is_read_as_it_was_written(tmp_path: Path) -> None:
    bare = LocalStore(str(tmp_path))
    ours = SignedStore(bare, OURS)
    label = archive_to(ours, 3)
    assert newest(ours).number == 3
    assert newest_metadata(ours) == (1, b"documents\n")
    assert set(ours.seen) == {"verified"}
    signed = [one.name for one in bare.list("") if is_signed(one.name)]
    assert signed == [LABEL, "metadata/0000000001.json", FIRST, SECOND, THIRD]
    for one in bare.list(""):
        text = bare.get_range(one.name, 0, one.size)
        assert text.endswith(b'"}\n') is (one.name in signed), one.name
    assert read_object(ours, FIRST, 1 << 20) == bare.get_range(FIRST, 0, 1 << 20)[:-LINE_BYTES]
    without = SignedStore(bare, None)
    assert (newest(without), set(without.seen)) == (newest(ours), {"unchecked"})
    assert newest(without).cluster == label.cluster
    with pytest.raises(UnsignedArchive, match="this archive is signed, and there is no key"):
        without.put_new("partition-0/tail.json", b"x")
    with pytest.raises(UnsignedArchive, match="was not signed with the key"):
        newest(SignedStore(bare, THEIRS))


def _forge(bare: LocalStore) -> None:
    """The log of somebody else, whole in itself: hashes all the way down."""
    forged = LocalStore(str(Path(bare.place) / "forged"))
    Path(forged.place).mkdir()
    archive_to(forged, 3, history=b"another")
    for one in forged.list(""):
        place = Path(bare.place) / one.name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(forged.get_range(one.name, 0, one.size))


def _put(bare: LocalStore, name: str, data: bytes) -> None:
    (Path(bare.place) / name).write_bytes(data)


FORGERIES: dict[str, Callable[[LocalStore], None]] = {
    "another log": _forge,
    "signed with another key": lambda bare: _put(
        bare, THIRD, bytes(SignedStore(bare, THEIRS)._signed(THIRD, read_object(SignedStore(bare, None), THIRD, 1 << 20)))
    ),
    "the signature is gone": lambda bare: _put(bare, THIRD, bare.get_range(THIRD, 0, 1 << 20)[:-LINE_BYTES]),
    "a signature of another object": lambda bare: _put(bare, THIRD, bare.get_range(SECOND, 0, 1 << 20)),
    "a byte is another": lambda bare: _put(
        bare, THIRD, bare.get_range(THIRD, 0, 1 << 20).replace(b"manifest", b"manifesT")
    ),
    "another line behind": lambda bare: _put(bare, THIRD, bare.get_range(THIRD, 0, 1 << 20) + b"\n"),
}


@pytest.mark.parametrize("how", FORGERIES)
@pytest.mark.parametrize("accepts_unsigned", [False, True])
def test_who_can_only_write_to_the_store_cannot_replace_the_log(
    tmp_path: Path, how: str, *, accepts_unsigned: bool
) -> None:
    bare = LocalStore(str(tmp_path))
    archive_to(SignedStore(bare, OURS), 3)
    before = newest(SignedStore(bare, OURS))
    FORGERIES[how](bare)
    reader = SignedStore(bare, OURS, accepts_unsigned=accepts_unsigned)
    try:
        found = newest(reader)
    except ArchiveDamaged:
        return
    assert accepts_unsigned, "what carries no signature is refused"
    assert reader.seen["unsigned"] > 0
    assert (found == before) is (how == "the signature is gone")


def test_saved_documents_are_not_replaced_either(tmp_path: Path) -> None:
    bare = LocalStore(str(tmp_path))
    ours = SignedStore(bare, OURS)
    save_metadata(ours, b"documents\n")
    _put(bare, "metadata/0000000001.json", b"others\n")
    with pytest.raises(UnsignedArchive, match="carries no signature"):
        metadata_at(ours, 1)


def test_a_signature_is_of_one_name(tmp_path: Path) -> None:
    bare = LocalStore(str(tmp_path))
    ours = SignedStore(bare, OURS)
    for text in (b"older documents\n", b"newer documents\n"):
        save_metadata(ours, text)
    first, second = "metadata/0000000001.json", "metadata/0000000002.json"
    _put(bare, second, bare.get_range(first, 0, 1000))
    with pytest.raises(UnsignedArchive, match="was not signed"):
        metadata_at(ours, 2)


def test_an_archive_that_is_older_than_its_key_is_adopted(tmp_path: Path) -> None:
    bare = LocalStore(str(tmp_path))
    archive_to(bare, 3)
    ours = SignedStore(bare, OURS)
    with pytest.raises(UnsignedArchive, match="carries no signature"):
        newest(ours)
    meanwhile = SignedStore(bare, OURS, accepts_unsigned=True)
    assert newest(meanwhile).number == 3
    assert set(meanwhile.seen) == {"unsigned"}
    save_metadata(meanwhile, b"more documents\n")
    names = [one.name for one in bare.list("") if is_signed(one.name)]
    unsigned = unsigned_among(bare, OURS, names)
    assert set(names) - set(unsigned) == {"metadata/0000000002.json"}, "what is written meanwhile is signed"
    assert sign_all(bare, OURS, names) == unsigned
    assert sign_all(bare, OURS, names) == []
    assert newest(ours).number == 3
    with pytest.raises(UnsignedArchive):
        sign_all(bare, THEIRS, names)


def test_what_is_larger_than_its_kind_is_refused_and_not_read_whole(tmp_path: Path) -> None:
    ours = SignedStore(LocalStore(str(tmp_path)), OURS)
    ours.put_new(FIRST, bytes(1000))
    assert read_object(ours, FIRST, 1000) == bytes(1000)
    with pytest.raises(StoreRefused, match="more than 999 bytes"):
        read_object(ours, FIRST, 999)
    assert ours.get_range(FIRST, 990, 20) == bytes(10)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda path: path.chmod(0o640), "chmod 600"),
        (lambda path: path.write_text("waltz-archive-key:12"), "holds no key"),
        (lambda path: path.unlink(), "cannot be read"),
    ],
)
def test_a_key_is_for_its_owner_alone(tmp_path: Path, spoil: Callable[[Path], Any], why: str) -> None:
    path = tmp_path / "archive.key"
    path.write_bytes(new_key())
    path.chmod(0o600)
    assert len(read_key(path)) == 32
    spoil(path)
    with pytest.raises(BadConfig, match=why):
        read_key(path)

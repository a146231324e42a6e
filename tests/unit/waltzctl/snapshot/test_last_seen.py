"""What is remembered of a cluster, and the archive for whoever helps: files that are whole, or not there."""

from __future__ import annotations

import errno
import io
import json
import os
import tarfile
from pathlib import Path

import pytest

from tests.unit.snapshots import KEY, server, well
from waltzctl.health.support import Bundle, describe, strip_secrets
from waltzctl.shell.blueprint import write_new
from waltzctl.show.forms import plain
from waltzctl.snapshot import last_seen
from waltzd.errors import CannotConnect, WaltzError
from waltzd.errors.operations import AlreadyThere, DiskFull

WHERE = "127.0.0.1:2181/waltz"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def some() -> last_seen.LastSeen:
    return last_seen.of(WHERE, well(), seen="2026-01-01T00:00:00Z", troubles={"silent s3": "2026-01-01T00:00:00Z"})


# -- the last snapshot --------------------------------------------------------------------------------------------------


def test_it_is_remembered_for_each_cluster() -> None:
    assert last_seen.load(WHERE) is None
    last_seen.save(some())
    assert last_seen.load(WHERE) == some()
    assert last_seen.load(WHERE + "/other") is None
    assert [meta.name for meta in some().storages] == ["s1", "s2", "s3"]


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "null", '{"schema": 2}', '{"schema": 1, "where": "127.0.0.1:2181/waltz"}', "[" * 100_000]
)
def test_what_cannot_be_used_is_as_if_it_were_not_there(cache: Path, content: str) -> None:
    last_seen.save(some())
    (path,) = cache.glob("waltz/*.json")
    path.write_text(content)
    assert last_seen.load(WHERE) is None
    last_seen.save(some())
    assert last_seen.load(WHERE) == some()


def test_a_damaged_document_in_it(cache: Path) -> None:
    last_seen.save(some())
    (path,) = cache.glob("waltz/*.json")
    fields = json.loads(path.read_text())
    fields["meta"]["key"] = "no key"
    path.write_text(json.dumps(fields))
    assert last_seen.load(WHERE) is None


def test_a_place_where_nothing_can_be_written(cache: Path) -> None:
    cache.write_text("a file in the place of a directory")
    last_seen.save(some())
    assert last_seen.load(WHERE) is None


# -- the archive -------------------------------------------------------------------------------------------------------


def bundle() -> Bundle:
    found = Bundle()
    found.put("b.txt", b"later")
    found.put_json("a.json", {"x": 1})
    return found


def test_the_same_content_is_the_same_archive(tmp_path: Path) -> None:
    assert bundle().packed() == bundle().packed()
    write_new(tmp_path / "one.tar.gz", bundle().packed())
    content = (tmp_path / "one.tar.gz").read_bytes()
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        assert tar.getnames() == ["waltz-support/a.json", "waltz-support/b.txt"]
        file = tar.extractfile("waltz-support/a.json")
        assert file is not None
        assert json.loads(file.read()) == {"version": 1, "x": 1}
    assert (tmp_path / "one.tar.gz").stat().st_mode & 0o777 == 0o600


def test_another_file_is_never_written_over(tmp_path: Path) -> None:
    path = tmp_path / "one.tar.gz"
    path.write_text("mine")
    with pytest.raises(AlreadyThere):
        write_new(path, b"ours")
    assert path.read_text() == "mine"


def test_what_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WaltzError) as caught:
        write_new(tmp_path / "no" / "one.tar.gz", b"ours")
    assert "one.tar.gz" in caught.value.message

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskFull):
        write_new(tmp_path / "one.tar.gz", b"ours")
    assert list(tmp_path.iterdir()) == []


def test_secrets_are_taken_out() -> None:
    text = "listen: 1\ntls_key: /etc/key.pem\ntls_certificate: /etc/c.pem\n  db_password: 'x'\nApiToken: y\nurl: pg://me:word@db/x\n"
    assert strip_secrets(text) == (
        "listen: 1\ntls_key: '(taken out)'\ntls_certificate: /etc/c.pem\n  db_password: '(taken out)'\n"
        "ApiToken: '(taken out)'\nurl: pg://me:***@db/x\n"
    )


def test_descriptions_are_plain() -> None:
    found = json.loads(json.dumps(describe(well())))
    assert sorted(found) == ["a", "b", "s1", "s2", "s3"]
    both = describe(well(servers=(server("s1"),)))
    assert [both[name]["vitals"] is not None and "is_leader" in both[name] for name in ("s1", "s1-storage")] == [
        True,
        False,
    ]
    assert found["s1"]["cluster_key"] == str(KEY)
    assert found["s1"]["assigned"][0]["status"]["last_id"] == 99
    assert plain(CannotConnect("so")) == {"code": "W4001", "message": "so"}

"""The store of a cluster on this machine: a new one is made, that of another cluster is left alone."""

from __future__ import annotations

from pathlib import Path
from uuid import UUID

import pytest

from waltzctl.local_cluster.local import SEGMENT_BYTES, settings_of, store_for
from waltzd.archive.manifest import LABEL, Label
from waltzd.archive.signature import read_key
from waltzd.errors import WaltzError
from waltzd.errors.operations import ForeignArchive, StoreUnavailable

KEY = UUID(int=3)


def test_a_directory_is_made_and_named_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert store_for("a/b", tmp_path) == str(tmp_path / "a/b")
    assert (tmp_path / "a/b").is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(WaltzError, match="making the directory"):
        store_for("file/inside", tmp_path)


def test_the_archive_of_another_cluster_is_refused(tmp_path: Path) -> None:
    (tmp_path / LABEL).write_bytes(Label(archive=UUID(int=1), cluster=KEY).text)
    with pytest.raises(ForeignArchive, match=str(KEY)) as found:
        store_for(str(tmp_path), tmp_path)
    assert found.value.detail_not_done == "nothing was started"


def test_all_daemons_know_the_store_and_segments_are_small(tmp_path: Path) -> None:
    assert settings_of("/a", tmp_path) == {"archive": "/a", "segment_bytes_max": SEGMENT_BYTES}


def test_an_archive_that_is_begun_has_a_key_beside_the_cluster_and_not_in_the_store(tmp_path: Path) -> None:
    cluster, store = tmp_path / "cluster", tmp_path / "store"
    cluster.mkdir()
    store_for(str(store), cluster)
    path = settings_of(str(store), cluster)["archive_key"]
    assert isinstance(path, Path)
    key = read_key(path)
    assert (path.parent, list(store.iterdir())) == (cluster, [])
    store_for(str(store), cluster)
    assert read_key(path) == key, "it stays"
    path.unlink()
    assert "archive_key" not in settings_of(str(store), cluster), "one that was begun without a key has none"


def test_a_bucket_that_does_not_answer_is_told_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"ENDPOINT": "http://127.0.0.1:9", "ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    with pytest.raises(StoreUnavailable) as found:
        store_for("s3://bucket/folder", tmp_path)
    assert found.value.detail_not_done == "nothing was started"
    assert "credentials" in found.value.detail_next_step

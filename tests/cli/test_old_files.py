"""Files that were written before the modules were merged (fixture `waltz-0.0`) are read as they were.

A cluster of two partitions and a consumer group wrote 201 transactions, archived and backed them up, and saved its
documents; then one storage's directory, the store, its key and the documents were kept.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from waltzd.cluster.metadata import read

Tool = Callable[..., Any]
FIXTURE = Path(__file__).parents[1] / "fixtures" / "waltz-0.0"
LAST_IDS = {0: 99, 1: 100}


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    copied = Path(shutil.copytree(FIXTURE, tmp_path / "waltz"))
    (copied / "archive.key").chmod(0o600)
    monkeypatch.setenv("WALTZ_ARCHIVE_KEY", str(copied / "archive.key"))
    return copied


def test_a_storage_directory_is_clean(waltzctl: Tool, copy: Path) -> None:
    told = waltzctl("verify-segments", copy / "storage", "-o", "json")
    assert told.code == 0, told
    assert {one["partition"]: one["last_id"] for one in json.loads(told.out)["partitions"]}.items() >= LAST_IDS.items()


def test_lost_indexes_are_made_again(waltzctl: Tool, copy: Path) -> None:
    before = sorted((copy / "storage").rglob("*.idx"))
    for path in before:
        path.unlink()
    assert waltzctl("rebuild-index", copy / "storage").code == 0
    assert sorted((copy / "storage").rglob("*.idx")) == before
    assert waltzctl("verify-segments", copy / "storage").code == 0


def test_an_archive_is_restored_to_its_last_transaction(waltzctl: Tool, copy: Path, tmp_path: Path) -> None:
    assert waltzctl("archive", "verify", copy / "archive").code == 0
    (tmp_path / "drill").mkdir()
    told = waltzctl("backup", "drill", copy / "archive", "--latest", "--directory", tmp_path / "drill", "-o", "json")
    assert told.code == 0, told
    answer = json.loads(told.out)
    assert answer["findings"] == []
    assert {one["partition"]: one["last_id"] for one in answer["partitions"]}.items() >= LAST_IDS.items()


def test_saved_documents_are_read() -> None:
    saved = read((FIXTURE / "metadata.json").read_bytes(), "metadata.json")
    assert (saved.meta.partitions, saved.left_out) == (2, ())

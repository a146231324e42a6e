"""Which options make which origin, and which make none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from waltz_spark.export.origin_options import OPTIONS, given_options, open_origin, paths_of
from waltz_spark.log.archive_segments import ArchiveSegments
from waltz_spark.log.directory_origin import DirectoryOrigin
from waltz_spark.log.live_origin import Certificate, JoinedOrigin, LiveOrigin

from waltzd.errors import BadArgument, WaltzError
from waltzd.errors.operations import NothingHere, PathMissing


def test_directories(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = str(original / "storage0"), str(original / "storage2")
    assert open_origin({"path": one}) == DirectoryOrigin(storages=(one,))
    monkeypatch.chdir(original)
    assert open_origin({"path": "storage0"}) == DirectoryOrigin(storages=(one,))
    assert open_origin({"PATH": f"file://{one}/"}) == DirectoryOrigin(storages=(one,))
    assert open_origin({"path": json.dumps([one, two])}) == DirectoryOrigin(storages=(one, two))
    assert open_origin({"paths": json.dumps([one, two])}) == DirectoryOrigin(storages=(one, two))
    all_three = tuple(str(original / f"storage{number}") for number in range(3))
    assert open_origin({"path": str(original)}) == DirectoryOrigin(storages=all_three)
    found = open_origin({"path": one, "allowuncommitted": "True"})
    assert found == DirectoryOrigin(storages=(one,), allows_uncommitted=True)
    assert found.describe() == f"everything in {one}"
    (tmp_path / "restored" / "0").mkdir(parents=True)
    (tmp_path / "restored" / "0" / "0000000000000000000.seg").touch()
    assert open_origin({"path": str(tmp_path / "restored")}) == DirectoryOrigin(storages=(str(tmp_path / "restored"),))


def test_clusters() -> None:
    assert open_origin({"bootstrap.servers": "a:1, b:2"}) == LiveOrigin(servers=("a:1", "b:2"))
    assert open_origin({"coordinator": "z:2181"}) == LiveOrigin(coordinator="z:2181", root="/waltz")
    found = open_origin(
        {
            "Coordinator": "z:2181,y:2181",
            "root": "/waltz/payments",
            "maxBytesPerSecond": "50MB",
            "tlsCertificate": "c.pem",
            "tlsKey": "k.pem",
            "tlsCa": "a.pem",
            "partitions": "0-3",
            "minPartitions": "8",
            "columns": "txid",
        }
    )
    assert found == LiveOrigin(
        coordinator="z:2181,y:2181",
        root="/waltz/payments",
        bytes_per_second=50_000_000,
        certificate=Certificate("c.pem", "k.pem", "a.pem"),
    )
    assert found.describe() == "the cluster at z:2181,y:2181/waltz/payments"


def test_an_archive_beside_its_cluster() -> None:
    bucket = ArchiveSegments(place="s3://b/f")
    live = LiveOrigin(coordinator="z:2181", root="/waltz")
    assert open_origin({"Archive": "s3://b/f", "coordinator": "z:2181"}) == JoinedOrigin(archive=bucket, live=live)
    here = ArchiveSegments(place=str(Path("b/f").absolute()))
    assert open_origin({"archive": "b/f", "coordinator": "z:2181"}) == JoinedOrigin(archive=here, live=live)
    found = open_origin({"archive": "s3://b/f", "bootstrap.servers": "a:1"})
    assert found.describe() == "the cluster at a:1 and the archive s3://b/f"


def test_an_archive_alone_is_refused(original: Path, tmp_path: Path) -> None:
    (tmp_path / "archive.json").touch()
    for options in (
        {"archive": str(tmp_path)},
        {"path": str(tmp_path)},
        {"path": json.dumps([str(original / "storage0"), str(tmp_path)])},
    ):
        with pytest.raises(BadArgument, match="reading an archive without its cluster was removed") as found:
            open_origin(options)
        assert "by coordinator or bootstrap.servers" in found.value.detail_next_step
        assert f"`waltzctl cluster restore {tmp_path}`" in found.value.detail_next_step


@pytest.mark.parametrize(
    ("options", "kind", "message", "next_step"),
    [
        ({}, BadArgument, "nothing says what to read", "give one of path, bootstrap.servers"),
        ({"path": ""}, BadArgument, "nothing says what to read", "give one of"),
        ({"path": "/x", "coordinator": "z:1"}, BadArgument, "path and coordinator name 2 places", "give one of"),
        (
            {"bootstrapservers": "a:1"},
            BadArgument,
            "there is no option bootstrapservers",
            "did you mean bootstrap.servers?",
        ),
        ({"path": "/x", "endingTxnId": "5"}, BadArgument, "there is no option endingTxnId", "did you mean endingTxnIds?"),
        ({"path": "/x", "zzz": "5"}, BadArgument, "there is no option zzz", "there are: allowUncommitted"),
        ({"path": "/x", "maxTxns": "5"}, BadArgument, "there is no option maxTxns", "did you mean maxTxnsPerTrigger?"),
        ({"path": "/x", "startingOffsets": "5"}, BadArgument, "no option startingOffsets", "did you mean startingTxnIds?"),
        ({"kafka.bootstrap.servers": "a:1"}, BadArgument, "no option kafka.", "did you mean bootstrap.servers?"),
        ({"path": "/x", "assign": "5"}, BadArgument, "there is no option assign", "did you mean partitions?"),
        ({"path": "/x", "verify": "none"}, BadArgument, "there is no option verify", "checksum is checked, always"),
        ({"path": "/x", "Partitions": "1", "partitions": "2"}, BadArgument, "partitions was given twice", ""),
        ({"path": "/x", "root": "/waltz"}, BadArgument, "the option root makes no sense with path", "leave root out"),
        ({"path": "/x", "archive": "/y"}, BadArgument, "the option archive makes no sense with path", "leave archive out"),
        ({"archive": "/y", "coordinator": "z:1", "bootstrap.servers": "a:1"}, BadArgument, "name 2 places", "give one of"),
        ({"archive": "ftp://y", "coordinator": "z:1"}, BadArgument, "ftp://y names no store", "name a directory, or"),
        ({"coordinator": "z:1", "allowUncommitted": "true"}, BadArgument, "allowUncommitted makes no sense with", "leave"),
        ({"bootstrap.servers": "a:1", "root": "/waltz"}, BadArgument, "root is where the cluster is in ZooKeeper", ""),
        ({"coordinator": "z:1", "storages": "a:1"}, BadArgument, "storages makes no sense with coordinator", ""),
        ({"coordinator": "z:1", "tlsKey": "k"}, BadArgument, "tlsCertificate and tlsCa missing", ""),
        ({"coordinator": "z:1", "maxBytesPerSecond": "fast"}, BadArgument, "maxBytesPerSecond: 'fast' is not a size", ""),
        ({"path": "/nothing/here"}, PathMissing, "path: /nothing/here does not exist", ""),
        ({"path": "[1]"}, BadArgument, "path has to be a list of paths", ""),
        ({"path": "[oops"}, BadArgument, "path starts like a list and is no JSON", ""),
    ],
)
def test_what_is_refused(options: dict[str, str], kind: type[WaltzError], message: str, next_step: str) -> None:
    with pytest.raises(kind) as caught:
        open_origin(options)
    assert message in caught.value.message
    assert next_step in caught.value.detail_next_step


def test_a_directory_without_anything_of_ours(tmp_path: Path, original: Path) -> None:
    (tmp_path / "photos").mkdir()
    with pytest.raises(NothingHere, match="holds no storage"):
        open_origin({"path": str(tmp_path)})
    storage = str(original / "storage0")
    with pytest.raises(BadArgument, match="names a directory twice"):
        open_origin({"path": json.dumps([storage, storage])})
    (tmp_path / "_waltz").mkdir()
    with pytest.raises(BadArgument, match="is no directory of a storage") as caught:
        open_origin({"path": json.dumps([storage, str(tmp_path)])})
    assert "spark.read.parquet" in caught.value.detail_next_step


def test_names_of_options_have_no_case_and_are_all_different() -> None:
    assert len({name.lower() for name in OPTIONS}) == len(OPTIONS)
    assert given_options({name.upper(): "x" for name in OPTIONS}) == {name.lower(): "x" for name in OPTIONS}
    assert paths_of("/a,b/") == ["/a,b"]

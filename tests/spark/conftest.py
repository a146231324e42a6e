"""One Spark for all tests of a worker: it takes ten seconds to start."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from tests.spark.growing import GrowingStorage

# Tests run beside each other: behind all of them, a Spark would wait for the processor until its own timeouts run out.
os.environ["WALTZ_SPARK_PRIORITY"] = "normal"
LOGGING = """
rootLogger.level = warn
rootLogger.appenderRef.file.ref = file
appender.file.type = File
appender.file.name = file
appender.file.fileName = {file}
appender.file.layout.type = PatternLayout
appender.file.layout.pattern = %d %p %c: %m%n%ex
"""


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Two cores, no pages, and everything that Java says in a file. The source is registered; filters are not pushed down
    unless a test says so (`pushing_down`), as it is where nobody has set anything."""
    from pyspark.sql import SparkSession
    from waltz_spark.engine.session import PATIENCE, find_java, redirect_output
    from waltz_spark.source import WaltzDataSource

    home = tmp_path_factory.mktemp("spark")
    (home / "log4j2.properties").write_text(LOGGING.format(file=home / "spark.log"))
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    os.environ["JAVA_HOME"] = find_java().home
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    flags = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
    builder: Any = SparkSession.builder
    with redirect_output(home / "java.log"):
        session = (
            builder.master("local[2]")
            .appName("waltz tests")
            .config("spark.ui.enabled", "false")
            .config(map=PATIENCE)
            .config("spark.driver.bindAddress", "127.0.0.1")
            .config("spark.driver.memory", "1g")
            .config("spark.driver.extraJavaOptions", f"{flags} -Dlog4j2.configurationFile={home / 'log4j2.properties'}")
            .config("spark.local.dir", str(home / "local"))
            .config("spark.sql.warehouse.dir", str(home / "warehouse"))
            .config("spark.sql.shuffle.partitions", "2")
            .config("spark.sql.session.timeZone", "UTC")
            .getOrCreate()
        )
        session.dataSource.register(WaltzDataSource)
        try:
            yield session
        finally:
            session.stop()


@pytest.fixture(autouse=True)
def no_haste(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run in this process publishes once, at its end, however long it takes, unless a test says otherwise."""
    monkeypatch.setattr("waltz_spark.export.export.PUBLISH_SECONDS", float("inf"))


@pytest.fixture
def pushing_down(spark: Any) -> Iterator[None]:
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    try:
        yield
    finally:
        spark.conf.unset("spark.sql.python.filterPushdown.enabled")


@pytest.fixture
def growing(tmp_path: Path) -> GrowingStorage:
    """Partitions 0 and 1, without records; 2 is not there yet."""
    return GrowingStorage(tmp_path / "storage", key=UUID(int=77), partitions=3, assigned=(0, 1))

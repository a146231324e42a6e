"""In place of a cluster that runs drivers: what spark-submit is told to hand over runs here, by Spark itself, as a driver
in client mode. Everything but the cluster is real: the zip, the settings, the program, and a Python that has no Waltz."""

from __future__ import annotations

import os
import sys
from pathlib import Path

LINE = ["--master", "yarn", "--deploy-mode", "cluster", "--properties-file"]
HOME = "STAND_IN_HOME"
"""Where the driver runs."""


def main() -> None:
    import pyspark

    given = sys.argv[1:]
    assert given[: len(LINE)] == LINE, given
    properties, program = given[len(LINE) :]
    assert Path(properties).stat().st_mode & 0o077 == 0
    print("Application report for application_1700000000000_0042 (state: ACCEPTED)", file=sys.stderr, flush=True)
    spark = Path(pyspark.__file__).parent / "bin" / "spark-submit"
    line = [str(spark), "--master", "local[2]", "--deploy-mode", "client", "--properties-file", properties,
            "--driver-java-options", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC", "--conf", "spark.ui.enabled=false",
            program]  # fmt: skip
    os.chdir(os.environ[HOME])
    os.execve(line[0], line, {**os.environ, "SPARK_LOCAL_IP": "127.0.0.1"})


if __name__ == "__main__":
    main()

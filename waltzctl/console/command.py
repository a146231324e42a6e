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
from typing import Annotated

import typer
from typer import Option

from waltzctl.console.watch import EVERY_SECONDS
from waltzctl.shell.cluster_target import ClusterTarget, CommandTarget
from waltzctl.shell.interruption import NUMBERS
from waltzctl.shell.options import Output
from waltzctl.show.forms import JSON_VERSION
from waltzd.client import loop
from waltzd.errors import EXIT_OK, BadArgument
from waltzd.errors.operations import ConsoleExposed, PortInUse
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
        float, Option("--every", min=0.5, max=60, metavar="SECONDS", help="Seconds between two polls of the cluster.")
    ] = EVERY_SECONDS,
    until_eof: Annotated[
        bool,
        Option(
            "--until-eof",
            help="End when standard input is closed, so that the console does not outlive the program that started it.",
        ),
    ] = False,
    target: CommandTarget,
    output: Output = "table",
) -> int:
    """Show a cluster in a browser, live. Each page lists the commands that print the same data, and those that change
    something. The console itself changes nothing. It runs until Ctrl-C, on this machine, apart from the daemons.

    The address that it prints opens once: the browser keeps a cookie. When it was used, another one is printed; with -o
    json, an object a line. It needs `pip install 'waltzd[console]'`.

    \b
    Examples:
      waltzctl console
      waltzctl console --listen 127.0.0.1:0
    """
    try:
        place = Address(HOST, PORT) if listen is None else parse_address(listen)
    except ValueError as error:
        raise BadArgument(f"--listen: {error}", not_done="the console did not start") from None
    if not place.is_loopback:
        raise ConsoleExposed(f"--listen {listen}: other machines would reach it")
    loop.run(_serve(target, place, may_move=listen is None, every=every, output=output, until_eof=until_eof), fast=True)
    return EXIT_OK


async def _serve(
    target: ClusterTarget, place: Address, *, may_move: bool, every: float, output: str, until_eof: bool
) -> None:
    """`may_move`: take a free port where this one is taken."""
    import uvicorn

    from waltzctl.console.bounded_protocol import BoundedProtocol
    from waltzctl.console.site import SessionAuth, Site, hosts_of
    from waltzctl.console.watch import Watch

    ended = asyncio.Event()

    class Server(uvicorn.Server):
        @contextmanager
        def capture_signals(
            self,
        ) -> Iterator[None]:  # the one of uvicorn raises the signal again at the end, which kills the process
            yield

        async def main_loop(self) -> None:  # that of uvicorn wakes up ten times a second to check whether it should end
            await ended.wait()

    watch = Watch(target, every=every)
    async with watch.running():
        with bound_socket(place, may_move=may_move) as bound:
            here = Address(place.host, bound.getsockname()[1])

            def put_address(token: str) -> None:  # a program may wait for it at the other end of a pipe
                address = f"http://{here}/enter?token={token}"
                typer.echo(json.dumps({"version": JSON_VERSION, "address": address}) if output == "json" else address)
                sys.stdout.flush()

            auth = SessionAuth(hosts=hosts_of(here.host, here.port), report=put_address)
            config = uvicorn.Config(
                Site(watch, auth).app,
                log_config=None,
                log_level="error",  # callers do not fill the terminal with warnings
                access_log=False,
                server_header=False,
                date_header=False,
                lifespan="off",
                ws="none",
                http=BoundedProtocol,
                timeout_graceful_shutdown=5,
            )

            def end() -> None:
                ended.set()
                watch.end()

            running = asyncio.get_running_loop()
            for number in NUMBERS:
                running.add_signal_handler(number, end)
            if until_eof:
                threading.Thread(target=_read_out, args=(running, end), name="standard-input", daemon=True).start()
            try:
                headline = f"The console of the cluster {watch.name} runs until Ctrl-C. An address opens once:"
                typer.echo(headline, err=True)
                auth.begin()
                await Server(config).serve(sockets=[bound])
            finally:
                for number in NUMBERS:
                    running.remove_signal_handler(number)


def _read_out(running: asyncio.AbstractEventLoop, end: Callable[[], None]) -> None:
    """Read standard input to its end, on a thread: a file cannot be waited for in another way."""
    with suppress(OSError, RuntimeError):  # the console has ended before
        while os.read(sys.stdin.fileno(), 4096):
            pass
        running.call_soon_threadsafe(end)


def bound_socket(place: Address, *, may_move: bool) -> socket.socket:
    try:
        return _listening(place)
    except PortInUse:
        if not may_move:
            raise
        return _listening(Address(place.host, 0))


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

"""The certificate of the person with `waltzctl`: three options, and what is wrong when a daemon does not talk to them.

Whatever is wrong with the files themselves is said before anything is asked of anybody.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Annotated, Any

from typer import Option

from waltzctl.options import CLUSTER
from waltzd.disk.real import translate
from waltzd.errors import BadArgument, BadConfig, CannotConnect, NotPermitted, TlsMismatch, WrongPeer
from waltzd.protocol.role import Role
from waltzd.wire.tls import Tls, speaks_tls

OPTIONS = {
    "--tls-certificate": "Your certificate, with the role operator. These three, or none.",
    "--tls-key": "Its key, which nobody else may read.",
    "--tls-ca": "The authorities that sign the daemons' certificates.",
}
_NOTHING_ASKED = "nothing was asked of any daemon"


def variable(option: str) -> str:
    return "WALTZ_" + option.removeprefix("--").replace("-", "_").upper()


def meant(option: str, metavar: str, meaning: str, **more: Any) -> Any:
    """One of the options that say which cluster is meant. Its variable is read by what it becomes, which remembers who said
    what."""
    help_ = f"{meaning} [env var: {variable(option)}]"
    return Option(option, metavar=metavar, help=help_, rich_help_panel=CLUSTER, **more)


TlsCertificate = Annotated[str | None, meant("--tls-certificate", "FILE", OPTIONS["--tls-certificate"])]
TlsKey = Annotated[str | None, meant("--tls-key", "FILE", OPTIONS["--tls-key"])]
TlsCa = Annotated[str | None, meant("--tls-ca", "FILE", OPTIONS["--tls-ca"])]


def tls_alone(
    tls_certificate: TlsCertificate = None, tls_key: TlsKey = None, tls_ca: TlsCa = None
) -> Callable[[], Tls | None]:
    """The certificate that options or variables name, of a person who names no cluster."""
    given = zip(OPTIONS, (tls_certificate, tls_key, tls_ca), strict=True)
    said = [value or os.environ.get(variable(option)) or None for option, value in given]
    return lambda: tls_of(*said)


def tls_of(certificate: str | None, key: str | None, ca: str | None) -> Tls | None:
    given = dict(zip(OPTIONS, (certificate, key, ca), strict=True))
    missing = [name for name, path in given.items() if path is None]
    if certificate is None or key is None or ca is None:
        if len(missing) == len(given):
            return None
        there = " and ".join(name for name in given if name not in missing)
        raise BadArgument(
            f"{there} without {' and '.join(missing)}: a certificate needs all three",
            not_done=_NOTHING_ASKED,
            next_step=f"give {' and '.join(f'{name} or {variable(name)}' for name in missing)} too, or none of them",
        )
    for path in (certificate, key, ca):
        _check_there(path)
    try:
        tls = Tls(certificate, key, ca, role=None)
    except BadConfig as error:
        raise BadArgument(
            error.message, not_done=_NOTHING_ASKED, next_step="correct the file, or give another one"
        ) from error
    if tls.identity.role is not Role.OPERATOR:
        raise NotPermitted(
            f"{certificate} has the role {tls.identity.role}; waltzctl needs the role {Role.OPERATOR}",
            not_done=_NOTHING_ASKED,
            next_step=f"use a certificate with the role {Role.OPERATOR}",
        )
    return tls


def _check_there(path: str) -> None:
    try:
        with open(path, "rb"):
            pass
    except OSError as error:
        raise translate(error, f"opening {path}") from error


# -- a daemon that does not talk ---------------------------------------------------------------------------------------


@asynccontextmanager
async def first_contact(address: str, tls: Tls | None) -> AsyncIterator[None]:
    """Around the first call to a daemon, one that changes nothing: when TLS is why it cannot be reached, say what to do."""
    try:
        yield
    except WrongPeer:
        raise
    except TlsMismatch as error:
        if tls is None:
            step = f"give {', '.join(OPTIONS)}, or set {', '.join(map(variable, OPTIONS))}"
        else:
            step = f"leave {', '.join(OPTIONS)} out, and their variables unset; or give the daemon a certificate"
        raise TlsMismatch(error.message, next_step=step) from error
    except CannotConnect as error:
        if tls is not None and await speaks_tls(address):
            raise CannotConnect(
                error.message,
                not_done="nothing was changed",
                next_step=f"{address} speaks TLS: check that its certificate is one of the cluster {tls.identity.key}, as "
                "yours is, and that each side has the authority of the other",
            ) from error
        raise

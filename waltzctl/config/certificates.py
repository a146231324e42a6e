"""Certificates for trials and for a first cluster, from an authority in a directory. The work is that of `openssl`.

Who a certificate is for is written as daemons read it (`waltzd.protocol.role`), and each is tried out as a daemon would
before it is put in place. Nothing that is there is ever written over.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
import uuid
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from waltzctl.shell.options import Output
from waltzctl.show.forms import put_json
from waltzd.disk.real import translate
from waltzd.errors import EXIT_OK, AlreadyThere, BadArgument, BadConfig, CertificateNotMade
from waltzd.protocol.address import is_name
from waltzd.protocol.role import Identity, Role
from waltzd.wire.tls import Tls

DAYS = 365
_AUTHORITY_DAYS = 3650
_CA, _CA_KEY = "ca.pem", "ca.key"
_DAEMONS = (Role.STORAGE, Role.SERVER)
_SUBJECT = """
[req]
prompt = no
distinguished_name = subject
[subject]
CN = {name}
"""
_AUTHORITY = """
[extensions]
basicConstraints = critical, CA:TRUE
keyUsage = critical, keyCertSign, cRLSign
subjectKeyIdentifier = hash
"""
_LEAF = """
[extensions]
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature
extendedKeyUsage = serverAuth, clientAuth
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
subjectAltName = @names
[names]
URI.1 = {uri}
"""


def issue(
    *,
    role: Annotated[Role, Argument(metavar="{server|storage|client|operator|observer}")],
    names: Annotated[tuple[str, ...], Argument(metavar="NAME...")],
    cluster_key: Annotated[uuid.UUID, Option("--cluster-key", help="Of the cluster, as in the storages' configuration.")],
    directory: Annotated[
        Path,
        Option(
            "--directory",
            file_okay=False,
            help="Where the authority is, and the certificates go. It is made where there is none.",
        ),
    ] = Path("certificates"),
    days: Annotated[int, Option("--days", min=1, max=_AUTHORITY_DAYS, help="Until they end.")] = DAYS,
    output: Output = "table",
) -> int:
    """Make certificates for trials and for a first cluster, of storages, servers, clients (applications), operators or
    observers (who look and change nothing) with these names. The first call makes the authority that signs them, ca.pem
    and ca.key; with ca.key a person can take any role in the cluster, so it stays in this directory. It calls the program
    `openssl`. No file is written over.

    \b
    Examples:
      waltzctl certificate issue storage s1 s2 s3 \\
        --cluster-key 5e0f0c8e-0d2f-4d0e-9a53-0a6f2f3c7b11
      waltzctl certificate issue operator ann --days 30 \\
        --cluster-key 5e0f0c8e-0d2f-4d0e-9a53-0a6f2f3c7b11
    """
    wrong = [name for name in names if not is_name(name)] or [name for name in names if names.count(name) > 1]
    if wrong:
        what = "is not a name: letters, digits, dots, dashes and underscores, at most 64"
        what = "is given twice" if is_name(wrong[0]) else what
        raise BadArgument(f"{wrong[0]!r} {what}", not_done="no certificate was made")
    wanted = [Identity(cluster_key, role, name) for name in names]
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".making-", dir=directory) as making:
            _issue(directory, Path(making), wanted, days)
    except OSError as error:
        raise translate(error, f"making certificates in {directory}") from error
    issued = {
        one: {
            field: os.path.abspath(directory / name)
            for field, name in zip(("tls_certificate", "tls_key", "tls_ca"), (*_files(one), _CA), strict=True)
        }
        for one in wanted
    }
    if output == "json":
        put_json({"certificates": [{"uri": one.uri, **paths} for one, paths in issued.items()]})
        return EXIT_OK
    for one, paths in issued.items():
        typer.echo(f"# {one.uri}")
        for field, path in paths.items():
            is_setting = one.role in _DAEMONS
            typer.echo(f"{field}: {path}" if is_setting else f"export WALTZ_{field.upper()}={shlex.quote(path)}")
    return EXIT_OK


def _files(identity: Identity) -> tuple[str, str]:
    return f"{identity.role}-{identity.name}.pem", f"{identity.role}-{identity.name}.key"


def _issue(directory: Path, making: Path, wanted: list[Identity], days: int) -> None:
    is_new = not any(os.path.lexists(directory / name) for name in (_CA, _CA_KEY))
    if is_new:
        _make_key(making / _CA_KEY)
        text = _SUBJECT.format(name="Waltz trial authority") + _AUTHORITY
        _openssl(making, text, "req", "-new", "-x509", "-key", making / _CA_KEY, "-out", making / _CA,
                 "-days", str(_AUTHORITY_DAYS), "-extensions", "extensions")  # fmt: skip
    authority = making if is_new else directory
    for name in (_CA, _CA_KEY):
        if not (authority / name).is_file():
            raise CertificateNotMade(
                f"{directory / name} is not there, and the other half of the authority is",
                next_step=f"put it back, or give another --directory: an authority is {_CA} and {_CA_KEY}",
            )
    for one in wanted:
        for name in _files(one):
            if os.path.lexists(directory / name):
                raise AlreadyThere(f"{directory / name} is there already", next_step="use it, or move it away first")
        _sign(making, authority, one, days)
    for name in (*((_CA_KEY, _CA) if is_new else ()), *(name for one in wanted for name in _files(one))):
        _place(making / name, directory / name)


def _sign(making: Path, authority: Path, identity: Identity, days: int) -> None:
    certificate, key = (making / name for name in _files(identity))
    _make_key(key)
    names = identity.dns_names if identity.role in _DAEMONS else ()
    text = _SUBJECT.format(name=identity.name) + _LEAF.format(uri=identity.uri)
    text += "".join(f"DNS.{number} = {name}\n" for number, name in enumerate(names, 1))
    request = making / "request.pem"
    _openssl(making, text, "req", "-new", "-key", key, "-out", request)
    _openssl(making, None, "x509", "-req", "-sha256", "-in", request, "-out", certificate, "-days", str(days),
             "-CA", authority / _CA, "-CAkey", authority / _CA_KEY, "-set_serial", str(uuid.uuid4().int),
             "-extfile", making / "openssl.cnf", "-extensions", "extensions")  # fmt: skip
    try:
        Tls(str(certificate), str(key), str(authority / _CA), role=identity.role, cluster=identity.key)
    except BadConfig as error:
        raise CertificateNotMade(f"what openssl made cannot be used: {error.message}") from error


def _make_key(path: Path) -> None:
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    _openssl(path.parent, None, "genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256",
             "-pkeyopt", "ec_param_enc:named_curve", "-out", path)  # fmt: skip
    path.chmod(0o600)


def _openssl(making: Path, configuration: str | None, *words: str | Path) -> None:
    """`configuration`: what it should read instead of the machine's, for a request."""
    command = ["openssl", *map(str, words)]
    if configuration is not None:
        (making / "openssl.cnf").write_text(configuration)
        command += ["-config", str(making / "openssl.cnf")]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
    except FileNotFoundError as error:
        raise CertificateNotMade("the program openssl is not here") from error
    if done.returncode != 0:
        said = " ".join(done.stderr.split()) or "it said nothing"
        raise CertificateNotMade(f"openssl {words[0]} ended with {done.returncode}: {said}")


def _place(made: Path, path: Path) -> None:
    """Whole, or not at all; never over what is there."""
    try:
        os.link(made, path)
    except FileExistsError as error:
        raise AlreadyThere(f"{path} is there already", next_step="it was made just now: run this again") from error

"""`waltzctl certificate`: certificates for trials and a first cluster, from an authority in a directory, made by `openssl`.

The identity is written in the form that daemons read (`waltzd.protocol.role`), and each certificate is loaded as a daemon
would load it before it is put in place. No existing file is overwritten.
"""

from __future__ import annotations

import enum
import ipaddress
import os
import shlex
import subprocess
import tempfile
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from waltzctl.shell.options import Output
from waltzctl.show.forms import put_json
from waltzd.cluster.zookeeper_credentials import CoordinatorTls
from waltzd.disk.real import translate
from waltzd.errors import EXIT_OK, BadArgument
from waltzd.errors.operations import AlreadyThere, BadConfig, CertificateNotMade
from waltzd.protocol.address import is_name
from waltzd.protocol.role import Identity, Role
from waltzd.wire.tls import Tls

DAYS = 365
_AUTHORITY_DAYS = 3650
CA, CA_KEY = "ca.pem", "ca.key"
ZOOKEEPER_CA, ZOOKEEPER_CA_KEY = "zookeeper-ca.pem", "zookeeper-ca.key"
"""The authority of ZooKeeper is another one: with that of the cluster, each application would get a connection to it."""
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
extendedKeyUsage = {usages}
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
subjectAltName = {names}
"""


class Kind(enum.StrEnum):
    """Kind of a certificate: a role, ZooKeeper itself, or a client of ZooKeeper."""

    SERVER = Role.SERVER.value
    STORAGE = Role.STORAGE.value
    CLIENT = Role.CLIENT.value
    OPERATOR = Role.OPERATOR.value
    OBSERVER = Role.OBSERVER.value
    ZOOKEEPER = "zookeeper"
    ZOOKEEPER_CLIENT = "zookeeper-client"


@dataclass(frozen=True)
class Wanted:
    kind: Kind
    name: str
    identity: Identity | None
    """Role in the certificate; None for ZooKeeper, which is identified by its host name."""

    @property
    def files(self) -> tuple[str, ...]:
        """True for ZooKeeper, which reads key and certificate from one file."""
        kinds = ("pem",) if self.kind is Kind.ZOOKEEPER else ("pem", "key")
        return tuple(f"{self.kind}-{self.name}.{kind}" for kind in kinds)

    @property
    def authority(self) -> tuple[str, str]:
        """Names of the certificate and key files of the authority that signs it."""
        return (ZOOKEEPER_CA, ZOOKEEPER_CA_KEY) if self.identity is None else (CA, CA_KEY)

    @property
    def usages(self) -> str:
        return "clientAuth" if self.kind is Kind.ZOOKEEPER_CLIENT else "serverAuth, clientAuth"

    @property
    def alternative_names(self) -> str:
        if self.kind is Kind.ZOOKEEPER_CLIENT:
            return f"URI:waltz-zookeeper-client:{self.name}"  # no host name, so that it cannot impersonate ZooKeeper
        if self.identity is None:
            return f"{'IP' if _is_ip(self.name) else 'DNS'}:{self.name}"
        names = self.identity.dns_names if self.identity.role in _DAEMONS else ()
        return ",".join([f"URI:{self.identity.uri}", *(f"DNS:{name}" for name in names)])


def _is_ip(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def issue(
    *,
    kind: Annotated[Kind, Argument(metavar="{server|storage|client|operator|observer|zookeeper|zookeeper-client}")],
    names: Annotated[tuple[str, ...], Argument(metavar="NAME...")],
    cluster_key: Annotated[
        uuid.UUID, Option("--cluster-key", help="Cluster key, as in the configuration of the storages.")
    ],
    directory: Annotated[
        Path,
        Option(
            "--directory",
            file_okay=False,
            help="Directory of the authority and the certificates; the authority is created if missing.",
        ),
    ] = Path("certificates"),
    days: Annotated[int, Option("--days", min=1, max=_AUTHORITY_DAYS, help="Days until the certificates expire.")] = DAYS,
    output: Output = "table",
) -> int:
    """Issue certificates for trials and a first cluster: for storages, servers, clients (applications), operators or
    observers (read only) with these names, or for ZooKeeper on these hosts. The first call creates the authority, ca.pem
    and ca.key. The holder of ca.key can take any role in the cluster, so keep it secret. ZooKeeper has its own authority,
    zookeeper-ca.pem and zookeeper-ca.key, which signs for ZooKeeper and, as zookeeper-client, for the servers and
    operators that connect to it; applications cannot connect there. The program `openssl` is used. No file is overwritten.

    \b
    Examples:
      waltzctl certificate issue storage s1 s2 s3 \\
        --cluster-key 5e0f0c8e-0d2f-4d0e-9a53-0a6f2f3c7b11
      waltzctl certificate issue operator ann --days 30 \\
        --cluster-key 5e0f0c8e-0d2f-4d0e-9a53-0a6f2f3c7b11
    """
    wrong = [name for name in names if not is_name(name)] or [name for name in names if names.count(name) > 1]
    if wrong:
        what = "is not a name: at most 64 letters, digits, dots, dashes and underscores"
        what = "is given twice" if is_name(wrong[0]) else what
        raise BadArgument(f"{wrong[0]!r} {what}", not_done="no certificate was made")
    wanted = [of_kind(kind, name, cluster_key) for name in names]
    make(directory, wanted, days)
    issued = {one: [os.path.abspath(directory / name) for name in (*one.files, one.authority[0])] for one in wanted}
    if output == "json":
        uris = {one: None if one.identity is None else one.identity.uri for one in wanted}
        put_json({"certificates": [{"uri": uris[one], **_fields(one, paths)} for one, paths in issued.items()]})
        return EXIT_OK
    for one, paths in issued.items():
        typer.echo(f"# {_describe(one)}")
        for line in _lines(one, paths):
            typer.echo(line)
    return EXIT_OK


def of_kind(kind: Kind, name: str, key: uuid.UUID) -> Wanted:
    is_of_zookeeper = kind in (Kind.ZOOKEEPER, Kind.ZOOKEEPER_CLIENT)
    return Wanted(kind, name, None if is_of_zookeeper else Identity(key, Role(kind.value), name))


def _describe(one: Wanted) -> str:
    if one.identity is not None:
        return one.identity.uri
    return f"ZooKeeper at {one.name}" if one.kind is Kind.ZOOKEEPER else f"{one.name}, at ZooKeeper"


def make(directory: Path, wanted: list[Wanted], days: int = DAYS) -> None:
    """Create the certificates in the directory, and the authority if there is none."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".making-", dir=directory) as making:
            _issue(directory, Path(making), wanted, days)
    except OSError as error:
        raise translate(error, f"making certificates in {directory}") from error


def _fields(one: Wanted, paths: list[str]) -> dict[str, str]:
    names: tuple[str, ...] = ("tls_certificate", "tls_key", "tls_ca")
    if one.identity is None:
        is_ours = one.kind is Kind.ZOOKEEPER_CLIENT
        names = tuple(f"coordinator_{name}" for name in names) if is_ours else ("tls_keystore", "tls_ca")
    return dict(zip(names, paths, strict=True))


def _lines(one: Wanted, paths: list[str]) -> list[str]:
    """Print the settings for a configuration file, or the variables for a shell."""
    if one.kind is Kind.ZOOKEEPER:
        stores = zip(("keyStore", "trustStore"), paths, strict=True)
        return [line for store, path in stores for line in (f"ssl.{store}.location={path}", f"ssl.{store}.type=PEM")]
    if one.identity is None or one.identity.role in _DAEMONS:
        return [f"{field}: {path}" for field, path in _fields(one, paths).items()]
    return [f"export WALTZ_{field.upper()}={shlex.quote(path)}" for field, path in _fields(one, paths).items()]


def _issue(directory: Path, making: Path, wanted: list[Wanted], days: int) -> None:
    made: list[str] = []
    homes: dict[str, Path] = {}
    for ca, ca_key in dict.fromkeys(one.authority for one in wanted):
        is_new = not any(os.path.lexists(directory / name) for name in (ca, ca_key))
        if is_new:
            _make_key(making / ca_key)
            text = (
                _SUBJECT.format(name=f"Waltz trial authority{' of ZooKeeper' if ca == ZOOKEEPER_CA else ''}") + _AUTHORITY
            )
            _openssl(making, text, "req", "-new", "-x509", "-key", making / ca_key, "-out", making / ca,
                     "-days", str(_AUTHORITY_DAYS), "-extensions", "extensions")  # fmt: skip
            made += [ca_key, ca]
        homes[ca] = making if is_new else directory
        for name in (ca, ca_key):
            if not (homes[ca] / name).is_file():
                raise CertificateNotMade(
                    f"{directory / name} is not there, and the other half of the authority is",
                    next_step=f"put it back, or give another --directory: an authority is {ca} and {ca_key}",
                )
    for one in wanted:
        for name in one.files:
            if os.path.lexists(directory / name):
                raise AlreadyThere(f"{directory / name} is there already", next_step="use it, or move it away first")
        _sign(making, homes[one.authority[0]], one, days)
    for name in (*made, *(name for one in wanted for name in one.files)):
        _place(making / name, directory / name)


def _sign(making: Path, authority: Path, one: Wanted, days: int) -> None:
    certificate, key = making / one.files[0], making / f"{one.kind}-{one.name}.key"
    ca, ca_key = (authority / name for name in one.authority)
    _make_key(key)
    text = _SUBJECT.format(name=one.name) + _LEAF.format(names=one.alternative_names, usages=one.usages)
    request = making / "request.pem"
    _openssl(making, text, "req", "-new", "-key", key, "-out", request)
    _openssl(making, None, "x509", "-req", "-sha256", "-in", request, "-out", certificate, "-days", str(days),
             "-CA", ca, "-CAkey", ca_key, "-set_serial", str(uuid.uuid4().int),
             "-extfile", making / "openssl.cnf", "-extensions", "extensions")  # fmt: skip
    try:
        if one.identity is None:
            CoordinatorTls(ca=str(ca), certificate=str(certificate), key=str(key)).check()
            if one.kind is Kind.ZOOKEEPER_CLIENT:
                return
            certificate.write_bytes(key.read_bytes() + certificate.read_bytes())
            certificate.chmod(0o600)
            return
        Tls(str(certificate), str(key), str(ca), role=one.identity.role, cluster=one.identity.key)
    except BadConfig as error:
        raise CertificateNotMade(f"the certificate that openssl made is not usable: {error.message}") from error


def _make_key(path: Path) -> None:
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    _openssl(path.parent, None, "genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256",
             "-pkeyopt", "ec_param_enc:named_curve", "-out", path)  # fmt: skip
    path.chmod(0o600)


def _openssl(making: Path, configuration: str | None, *words: str | Path) -> None:
    """Run openssl. `configuration` is its configuration file for a request."""
    command = ["openssl", *map(str, words)]
    if configuration is not None:
        (making / "openssl.cnf").write_text(configuration)
        command += ["-config", str(making / "openssl.cnf")]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
    except FileNotFoundError as error:
        raise CertificateNotMade("the program openssl is not here") from error
    if done.returncode != 0:
        complaint = " ".join(done.stderr.split()) or "no error message"
        raise CertificateNotMade(f"openssl {words[0]} ended with {done.returncode}: {complaint}")


def _place(made: Path, path: Path) -> None:
    """Write a new file atomically; never overwrite one."""
    try:
        os.link(made, path)
    except FileExistsError as error:
        raise AlreadyThere(f"{path} is there already", next_step="it was made just now: run this again") from error

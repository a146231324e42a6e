"""Connection settings for ZooKeeper: TLS or plain text, and the credentials of the cluster's own processes.

A process that can change the documents of a cluster decides which storages and servers the cluster has. In a *closed*
cluster, every document belongs to one name with a password (ZooKeeper's scheme `digest`); other processes have no rights.
All servers and operators have a file with that name and password. The first line of the file is the owner of new
documents; further lines are sent to ZooKeeper as well, so that a password can be replaced without downtime. A line that
begins with `read-only ` is a name that may read the documents, without the secret of client ids, and change nothing.
Certificates do not replace the password: ZooKeeper tells their holders apart by subject, and applications can have any.
"""

from __future__ import annotations

import base64
import enum
import hashlib
import os
import ssl
import stat
from dataclasses import dataclass

from waltzd.errors.operations import BadConfig

CREDENTIALS_BYTES_MAX = 64 << 10
READ_ONLY = "read-only "
UNREAD = "/ids/client"
"""Path of the document that read-only names cannot read: its secret would let them forge tokens of client ids."""
_EXAMPLE = "write one line like waltz:a-long-random-password"


class Verify(enum.StrEnum):
    """Properties of ZooKeeper's certificate that are checked, besides its authority."""

    HOST = "host"
    """The certificate must name the host or the address that was connected to."""
    AUTHORITY = "authority"
    """Any certificate of the authority is accepted: each holder of one can impersonate ZooKeeper."""


@dataclass(frozen=True, kw_only=True)
class CoordinatorTls:
    ca: str
    """File with the authorities that sign for ZooKeeper."""
    certificate: str | None
    """File with the certificate of this process, which ZooKeeper requires by default; None to send none."""
    key: str | None
    """File with the private key of `certificate`."""
    verify: Verify = Verify.HOST

    def context(self) -> ssl.SSLContext:
        """Return a new TLS context, so that replaced files are used from the next connection on.

        The authorities of the machine are not trusted: they sign for the whole internet."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.check_hostname = self.verify is Verify.HOST
        context.load_verify_locations(self.ca)
        if self.certificate is not None:
            context.load_cert_chain(self.certificate, self.key)
        return context

    def check(self) -> None:
        """Raise `BadConfig` if the files cannot be used."""
        try:
            self.context()
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            said = error.strerror or getattr(error, "reason", None) or error if isinstance(error, OSError) else error
            files = ", ".join(path for path in (self.certificate, self.key, self.ca) if path is not None)
            raise BadConfig(f"TLS to ZooKeeper cannot be used with {files}: {said}") from error


@dataclass(frozen=True, kw_only=True)
class ZooKeeperCredentials:
    tls: CoordinatorTls | None = None
    credentials: tuple[str, ...] = ()
    """Credentials as `name:password`; documents that are created belong to the first."""
    readers: tuple[str, ...] = ()
    """Credentials as `name:password` that may only read documents."""

    @property
    def has_credentials(self) -> bool:
        return bool(self.credentials)

    @property
    def owner(self) -> str:
        """Owner of created documents, as ZooKeeper writes it in an ACL."""
        return self.names[0]

    @property
    def names(self) -> list[str]:
        """Owner that each of the credentials stands for, as ZooKeeper writes it in an ACL."""
        return [digest_of(one) for one in self.credentials]

    def __repr__(self) -> str:
        """Leave passwords out: the text may end up in a log."""
        names, readers = ([one.partition(":")[0] for one in given] for given in (self.credentials, self.readers))
        return f"ZooKeeperCredentials(tls={self.tls}, names={names}, readers={readers})"


def digest_of(credentials: str) -> str:
    """Return the name and the digest of `name:password`, as ZooKeeper writes it."""
    # SHA-1 is ZooKeeper's default. A long random password makes up for the age of the algorithm.
    digest = hashlib.sha1(credentials.encode(), usedforsecurity=False).digest()
    return f"{credentials.partition(':')[0]}:{base64.b64encode(digest).decode()}"


NO_CREDENTIALS = ZooKeeperCredentials()
"""Plain text, and no credentials."""


OFF = "off"
TLS_MODES = (OFF, *Verify)
"""Values of the setting `coordinator_tls`."""


def load_credentials(
    how: str,
    *,
    certificate: str | None = None,
    key: str | None = None,
    ca: str | None = None,
    credentials: str | None = None,
) -> ZooKeeperCredentials:
    """Load the files that settings or options name; raise `BadConfig` if one of them cannot be used."""
    if how not in TLS_MODES:
        raise BadConfig(f"TLS to ZooKeeper is one of {', '.join(TLS_MODES)}, not {how!r}")
    tls = None
    if how != OFF:
        if ca is None:
            raise BadConfig("TLS to ZooKeeper needs the authorities that sign for it")
        tls = CoordinatorTls(ca=ca, certificate=certificate, key=key, verify=Verify(how))
        tls.check()
    lines = () if credentials is None else read_credentials(credentials)
    return ZooKeeperCredentials(
        tls=tls,
        credentials=tuple(line for line in lines if not line.startswith(READ_ONLY)),
        readers=tuple(line.removeprefix(READ_ONLY) for line in lines if line.startswith(READ_ONLY)),
    )


def read_credentials(path: str) -> tuple[str, ...]:
    """Return the lines of a file that only its owner may read; raise `BadConfig` when it is not one."""
    try:
        with open(path, "rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            data = file.read(CREDENTIALS_BYTES_MAX + 1)
        text = data.decode("ascii")
    except OSError as error:
        raise BadConfig(f"{path}: the credentials for ZooKeeper cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise BadConfig(f"{path} holds no credentials for ZooKeeper: it is not ASCII text; {_EXAMPLE}") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise BadConfig(f"{path} can be read by other users of this machine, and holds a password: chmod 600 {path}")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    for number, line in enumerate(lines, 1):
        given = line.removeprefix(READ_ONLY)
        name, _, password = given.partition(":")
        if not name or not password or any(not " " < one <= "~" for one in given):
            raise BadConfig(f"{path}: entry {number} is not a name and a password; {_EXAMPLE}")
    if all(line.startswith(READ_ONLY) for line in lines) or len(data) > CREDENTIALS_BYTES_MAX:
        raise BadConfig(f"{path} holds no credentials for ZooKeeper; {_EXAMPLE}")
    return tuple(lines)

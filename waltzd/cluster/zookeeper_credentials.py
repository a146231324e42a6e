"""How ZooKeeper is reached, and as whom: TLS or plain text, and the credentials by which it knows the cluster's own
processes.

Whoever may change the documents of a cluster decides which storages and servers it has. So a *closed* cluster gives every
document to one name with a password (ZooKeeper's scheme `digest`) and nothing to anybody else. All servers and operators
have that name in a file. The first line of the file is who documents are given to; others are shown as well, so that a
password can be replaced while everything runs. A line that begins with `read-only ` is another name with a password: it may
read the documents and change nothing, and does not see the secret of client ids. Certificates do not take the place of the
password: ZooKeeper would tell their holders apart by their subjects, and an application's may have any.
"""

from __future__ import annotations

import base64
import enum
import hashlib
import os
import ssl
import stat
from dataclasses import dataclass

from waltzd.errors import BadConfig

CREDENTIALS_BYTES_MAX = 64 << 10
READ_ONLY = "read-only "
UNREAD = "/ids/client"
"""The path of the document that who only reads does not see: with the secret there, tokens of client ids can be made."""
_EXAMPLE = "write one line like waltz:a-long-random-password"


class Verify(enum.StrEnum):
    """What has to be right about the certificate of ZooKeeper, apart from its authority."""

    HOST = "host"
    """It carries the host name, or the address, that was connected to."""
    AUTHORITY = "authority"
    """Nothing else: the authority signs for nobody but ZooKeeper, or everybody whom it signs for may pose as ZooKeeper."""


@dataclass(frozen=True, kw_only=True)
class CoordinatorTls:
    ca: str
    certificate: str | None
    """Ours, and its key: ZooKeeper asks for one unless it is told not to."""
    key: str | None
    verify: Verify = Verify.HOST

    def context(self) -> ssl.SSLContext:
        """Made anew for each connection, so files that were replaced count from the next one on. No other authority is
        trusted: those of the machine sign for the whole world."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.check_hostname = self.verify is Verify.HOST
        context.load_verify_locations(self.ca)
        if self.certificate is not None:
            context.load_cert_chain(self.certificate, self.key)
        return context

    def check(self) -> None:
        """`BadConfig` when the files cannot be used."""
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
    """Each `name:password`; documents are given to the first."""
    readers: tuple[str, ...] = ()
    """Each `name:password`; documents may be read with it."""

    @property
    def has_credentials(self) -> bool:
        return bool(self.credentials)

    @property
    def owner(self) -> str:
        """Who the documents are given to, as ZooKeeper writes it."""
        return self.names[0]

    @property
    def names(self) -> list[str]:
        """Each of the credentials as ZooKeeper writes its owner in an ACL."""
        return [digest_of(one) for one in self.credentials]

    def __repr__(self) -> str:
        """Without passwords: it may end up in a log."""
        names, readers = ([one.partition(":")[0] for one in given] for given in (self.credentials, self.readers))
        return f"ZooKeeperCredentials(tls={self.tls}, names={names}, readers={readers})"


def digest_of(credentials: str) -> str:
    """Return the name and the digest of `name:password`, as ZooKeeper writes it."""
    # The algorithm is ZooKeeper's default. A password that nobody chose by heart makes up for its age.
    digest = hashlib.sha1(credentials.encode(), usedforsecurity=False).digest()
    return f"{credentials.partition(':')[0]}:{base64.b64encode(digest).decode()}"


NO_CREDENTIALS = ZooKeeperCredentials()
"""Plain text, and nobody in particular."""


OFF = "off"
TLS_MODES = (OFF, *Verify)
"""What may be said of TLS to ZooKeeper."""


def load_credentials(
    how: str,
    *,
    certificate: str | None = None,
    key: str | None = None,
    ca: str | None = None,
    credentials: str | None = None,
) -> ZooKeeperCredentials:
    """From what settings or options say, with the files that they name; `BadConfig` when one of them cannot be used."""
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

"""Certificates from files, which may be replaced while a process runs.

Three files in PEM: the certificate of this process (with intermediate ones behind it), its key, and the certificates of
the authorities. They are tested before they are used, by a handshake of the process with itself in memory. It proves
that the key belongs to the certificate, that the certificate is signed and valid, and which role and cluster it names.
If the files fail this later, perhaps half replaced, the loaded ones stay in use, and the log says why. The files are
checked for changes at every new connection, and read on demand (`reload`, by SIGHUP).
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
import stat
import threading
import time
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias
from uuid import UUID

from waltzd.errors import CannotConnect, TlsMismatch
from waltzd.errors.operations import BadConfig, WrongPeer
from waltzd.protocol.address import Address, parse_address
from waltzd.protocol.role import Certificate, Identity, Revoked, Role, dns_name, read_certificate, read_revocations

FILE_BYTES_MAX = 1 << 20
PROBE_SECONDS = 2.0
CERTIFIED_SECONDS = 4.0
"""Seconds between two checks of the certificate of an open connection or call. Its end within five seconds is promised."""
AGAIN_SECONDS = 2.0
"""Seconds after which files that could not be used are tried again. Their cause may pass: no descriptor is free, or the
certificate is not valid yet."""
_NOT_TLS = frozenset({"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE"})
"""Reasons that old and new OpenSSL give for an answer that is not TLS."""
_log = logging.getLogger("waltz.tls")
_Signature: TypeAlias = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Credentials:
    """Contents of the files, proven to work."""

    certificate: bytes
    key: bytes
    ca: bytes
    identity: Identity
    ends: float
    """End of validity of the certificate, in seconds since 1970."""
    answering: ssl.SSLContext = field(repr=False, compare=False)
    """Context for connections that are accepted."""
    calling: ssl.SSLContext = field(repr=False, compare=False)
    """Context for connections that we make."""
    revoked: Revoked = frozenset()


class Files(Protocol):
    """Settings that name the certificate files of a daemon: all of them are set, or none."""

    @property
    def tls_certificate(self) -> str | None: ...
    @property
    def tls_key(self) -> str | None: ...
    @property
    def tls_ca(self) -> str | None: ...
    @property
    def tls_revoked(self) -> str | None: ...


def tls_for(files: Files, role: Role, cluster: UUID | None) -> Tls | None:
    """Return the certificate of a daemon, or None if it has no certificate. Raise `BadConfig` if its files cannot be used:
    they are missing, do not fit together, or name another role or cluster. `cluster` is None for a server that has not
    heard from the coordinator which cluster it is in."""
    if files.tls_certificate is None or files.tls_key is None or files.tls_ca is None:
        return None
    paths = files.tls_certificate, files.tls_key, files.tls_ca
    return Tls(*paths, role=role, cluster=cluster, revoked=files.tls_revoked)


class Tls:
    """The certificate of this process. It must name `role` and `cluster`; None accepts what it names at first."""

    def __init__(
        self,
        certificate: str,
        key: str,
        ca: str,
        *,
        role: Role | None,
        cluster: UUID | None = None,
        revoked: str | None = None,
    ) -> None:
        """Load the files. `revoked` is the path of a file with revocation lists."""
        self._paths = (certificate, key, ca)
        self._revoked = revoked
        self._role = role
        self._cluster = cluster
        self._complaint = ""
        self._again_at: float | None = None
        """Time of the steady clock at which the files are tried again; None while the newest ones are in use."""
        self._lock = threading.Lock()
        """Lock for calls by gRPC, which come on a thread of its own."""
        self._seen = self._signature()
        self._credentials = self._load(self._seen)
        self._role, self._cluster = self._credentials.identity.role, self._credentials.identity.key

    @property
    def identity(self) -> Identity:
        return self._credentials.identity

    @property
    def path(self) -> str:
        """Return the path of the certificate."""
        return self._paths[0]

    def current(self) -> Credentials:
        """Return the current contents of the files. Files that cannot be used are tried again until they can."""
        with self._lock:
            self._look(again=False)
            return self._credentials

    def refusal(self, certificate: Certificate | None) -> str | None:
        """Return why a certificate is not valid now; None if it is."""
        return None if certificate is None else certificate.refusal(time.time(), self.current().revoked)

    def reload(self) -> BadConfig | None:
        """Read the files whether they have changed or not. Return the error if they cannot be used: the loaded ones
        stay in use then."""
        with self._lock:
            before = self._credentials
            self._complaint = ""
            problem = self._look(again=True)
            if problem is None and self._credentials is before:
                _log.info("the certificate %s was read again: it is the one that is in use, and ends at %s",
                          self.path, moment(before.ends))  # fmt: skip
            return problem

    def _look(self, *, again: bool) -> BadConfig | None:
        try:
            seen = self._signature()
            if again or seen != self._seen or (self._again_at is not None and time.monotonic() >= self._again_at):
                self._seen, self._again_at = seen, time.monotonic() + AGAIN_SECONDS
                found = self._load(seen)
                self._again_at = None
                if found != self._credentials:  # otherwise channels that work would be given up for nothing
                    self._credentials = found
                    _log.info("the certificate %s was replaced; new connections use it, and it ends at %s",
                              self.path, moment(found.ends))  # fmt: skip
            if self._again_at is None:
                self._complaint = ""
        except BadConfig as error:
            if error.message != self._complaint:
                _log.error("%s %s; the certificate that was loaded before stays in use", error.code, error.message)
            self._complaint = error.message
            return error
        return None

    def answering(self) -> ssl.SSLContext:
        """Return a context for accepting connections, which demands a certificate. It has no certificate itself: each
        handshake gets the current contents of the files."""
        context = _strict(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))

        def newest(handshake: ssl.SSLSocket | ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
            handshake.context = self.current().answering

        context.sni_callback = newest
        return context

    def showing(self) -> ssl.SSLContext:
        """Return a context for a port that shows its certificate and demands none, because monitoring has none."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2

        def newest(handshake: ssl.SSLSocket | ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
            handshake.context = self.current().answering

        context.sni_callback = newest
        return context

    def calling(self) -> ssl.SSLContext:
        """Return a context for making connections: the other side must be valid for the name that is asked for. Call
        `check_peer` afterwards, because a DNS name alone proves nothing."""
        return self.current().calling

    def _context(self, side: int) -> ssl.SSLContext:
        certificate, key, ca = self._paths
        context = ssl.SSLContext(side)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(certificate, key, password=lambda: "")
            context.load_verify_locations(ca)
        except (OSError, ssl.SSLError) as error:  # they are being replaced at this moment
            raise BadConfig(f"{certificate}, {key} and {ca} cannot be used: {_reason(error)}") from error
        return context

    def _signature(self) -> _Signature:
        found: list[tuple[int, int, int]] = []
        for path in (*self._paths, *([self._revoked] if self._revoked is not None else ())):
            try:
                status = os.stat(path)
            except OSError as error:
                raise BadConfig(f"cannot read {path}: {error.strerror}") from error
            found.append((status.st_ino, status.st_size, status.st_mtime_ns))
        return tuple(found)

    def _load(self, seen: _Signature) -> Credentials:
        certificate, key, ca = (_content(path) for path in self._paths)
        _check_secret(self._paths[1])
        identity, ends = _proven(*self._paths)
        answering = _strict(self._context(ssl.PROTOCOL_TLS_SERVER))
        calling = self._context(ssl.PROTOCOL_TLS_CLIENT)
        calling.set_alpn_protocols(["h2"])  # ports of gRPC refuse callers without it
        if self._signature() != seen:
            raise BadConfig(f"{', '.join(self._paths)} changed while they were read")
        if self._role is not None and identity.role is not self._role:
            raise BadConfig(f"{self._paths[0]} has the role {identity.role}; this process needs the role {self._role}")
        if self._cluster is not None and identity.key != self._cluster:
            raise BadConfig(f"{self._paths[0]} belongs to the cluster {identity.key}, this process to {self._cluster}")
        return Credentials(certificate, key, ca, identity, ends, answering, calling, _revoked_in(self._revoked))


def moment(seconds: float) -> str:
    """Format seconds since 1970 as UTC."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def _strict(context: ssl.SSLContext) -> ssl.SSLContext:
    """Make a context check each caller at every connection. A resumed session would not be checked, so a caller could
    return for hours after its authority was removed. TLS 1.2 cannot be told to resume no session; all callers are
    processes of Waltz and support TLS 1.3."""
    context.verify_mode = ssl.CERT_REQUIRED
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0
    return context


def _revoked_in(path: str | None) -> Revoked:
    if path is None:
        return frozenset()
    try:
        return read_revocations(_content(path))
    except ValueError as error:
        raise BadConfig(f"{path} has {error}") from error


def _content(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise BadConfig(f"cannot read {path}: {error.strerror}") from error
    if len(content) > FILE_BYTES_MAX:
        raise BadConfig(f"{path} is larger than {FILE_BYTES_MAX} bytes: these are no certificates")
    return content


def _check_secret(path: str) -> None:
    """Raise if other users can read or write a key. Symbolic links are followed, because certificates are often
    installed by one."""
    try:
        mode = stat.S_IMODE(os.stat(path).st_mode)
    except OSError as error:
        raise BadConfig(f"cannot read {path}: {error.strerror}") from error
    if mode & (stat.S_IROTH | stat.S_IWOTH):
        raise BadConfig(f"{path} can be read or changed by every user of this machine; make it private: chmod 600 {path}")


# -- the other end -----------------------------------------------------------------------------------------------------


def certificate_of(side: ssl.SSLObject | None) -> Certificate | None:
    """Return the certificate of the other end; None without one."""
    found = None if side is None else side.getpeercert(binary_form=True)
    return None if found is None else read_certificate(found)


def identity_of(side: ssl.SSLObject | None) -> Identity | None:
    """Return the identity of the other end; None without a certificate, or if it names none."""
    found = None if side is None else side.getpeercert(binary_form=True)
    return None if found is None else Identity.of_certificate(found)


def check_valid(tls: Tls, side: ssl.SSLObject | None, address: str) -> None:
    why = tls.refusal(certificate_of(side))
    if why is not None:
        raise WrongPeer(f"the certificate of the process at {address} {why}")


def check_peer(identity: Identity | None, address: str, *, key: UUID, role: Role, name: str | None) -> None:
    """Raise unless the process at an address is the one that is meant. An impostor there says nothing about other
    addresses, so this counts as no answer."""
    if identity is not None and (identity.key, identity.role) == (key, role) and name in (None, identity.name):
        return
    who = "has no identity" if identity is None else f"is that of {identity.uri}"
    meant = f"waltz://{key}/role/{role}/{name or '…'}"
    raise WrongPeer(f"the certificate of the process at {address} {who}, not of {meant}")


async def certificate_at(tls: Tls, address: Address, *, role: Role, name: str | None) -> bytes:
    """Return the certificate, in DER, of the process at an address; raise if another one is meant. Nothing is sent to
    it."""
    expected = dns_name(tls.identity.key, role)
    try:
        _, writer = await asyncio.open_connection(address.host, address.port, ssl=tls.calling(), server_hostname=expected)
    except OSError as error:  # SSLError is an OSError
        if isinstance(error, ssl.SSLError) and error.reason in _NOT_TLS:
            raise TlsMismatch(f"{address} does not speak TLS, and a certificate was given") from error
        raise CannotConnect(f"cannot connect to {address}: {_reason(error)}") from error
    try:
        side: ssl.SSLObject = writer.get_extra_info("ssl_object")
        check_peer(identity_of(side), str(address), key=tls.identity.key, role=role, name=name)
        check_valid(tls, side, str(address))
        found = side.getpeercert(binary_form=True)
        assert found is not None
        return found
    finally:
        writer.transport.abort()


async def speaks_tls(address: str) -> bool | None:
    """Return whether a port speaks TLS; None if that cannot be told. Nothing is checked and nothing is sent."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        place = parse_address(address)
        async with asyncio.timeout(PROBE_SECONDS):
            _, writer = await asyncio.open_connection(place.host, place.port, ssl=context)
    except ssl.SSLError as error:
        return False if error.reason in _NOT_TLS else None
    except (OSError, ValueError):  # no connection, no answer, no address
        return None
    writer.transport.abort()
    return True


# -- a handshake in memory ---------------------------------------------------------------------------------------------


def _proven(certificate: str, key: str, ca: str) -> tuple[Identity, float]:
    """Return the identity in a certificate and the end of its validity, after proving that the files work."""
    try:
        side = _handshake(certificate, key, ca, hostname=None)
        identity, ends = identity_of(side), _end(side)
    except (ssl.SSLError, OSError, ValueError) as error:
        raise BadConfig(f"{certificate}, {key} and {ca} do not make a usable certificate: {_reason(error)}") from error
    if identity is None:
        raise BadConfig(
            f"{certificate} names no identity: among its names there must be one URI of the form "
            "waltz://<cluster key>/role/<server|storage|client|operator|observer>/<name>"
        )
    if identity.role in (Role.SERVER, Role.STORAGE):
        for name in identity.dns_names:
            try:
                _handshake(certificate, key, ca, hostname=name)
            except (ssl.SSLError, OSError, ValueError) as error:
                raise BadConfig(f"{certificate} cannot answer as {name}: {_reason(error)}") from error
    return identity, ends


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    return getattr(error, "reason", None) or str(error)


def _handshake(certificate: str, key: str, ca: str, *, hostname: str | None) -> ssl.SSLObject:
    """Do a handshake of this process with itself. Each side demands a certificate of the other side; with a host
    name, the caller checks the name as well."""
    answering, calling = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    calling.check_hostname = False
    calling.verify_mode = ssl.CERT_NONE
    for context in (answering, calling):
        context.load_cert_chain(certificate, key, password=lambda: "")
        context.load_verify_locations(ca)
    answering.verify_mode = ssl.CERT_REQUIRED
    if hostname is not None:
        calling.verify_mode = ssl.CERT_REQUIRED
        calling.check_hostname = True
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = calling.wrap_bio(back, there, server_hostname=hostname)
    server = answering.wrap_bio(there, back, server_side=True)
    waiting = [client, server]
    for _ in range(20):
        for side in list(waiting):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            waiting.remove(side)
        if not waiting:
            return server
    raise ValueError("the handshake does not end")


def _end(side: ssl.SSLObject) -> float:
    ends = (side.getpeercert() or {}).get("notAfter")
    assert isinstance(ends, str)
    return float(ssl.cert_time_to_seconds(ends))

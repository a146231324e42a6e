"""The identity of a process in its certificate: one role in one cluster, under one name. Pure.

The identity is a URI among the subject alternative names of the certificate. The same code checks both sides of a call.
Names of other types (DNS, e-mail) are never an identity, whatever their text is. The certificates of daemons also have DNS
names, because TLS libraries require one. No host is named: a server or a storage may run on any machine.
"""

from __future__ import annotations

import binascii
import calendar
import enum
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias
from uuid import UUID

_INTEGER, _OCTETS, _OID, _SEQUENCE = 0x02, 0x04, 0x06, 0x30
_SHORT_TIME, _LONG_TIME = 0x17, 0x18
_VERSION, _EXTENSIONS, _URI_NAME = 0xA0, 0xA3, 0x86
_SUBJECT_ALTERNATIVE_NAME = bytes.fromhex("551d11")
_LIST = re.compile(rb"-----BEGIN X509 CRL-----\s+([A-Za-z0-9+/=\s]+?)\s+-----END X509 CRL-----")
_TIME = re.compile(r"([0-9]{4})([0-9]{2})([0-9]{2})([0-9]{2})([0-9]{2})([0-9]{2})Z")

Revoked: TypeAlias = frozenset[tuple[bytes, int]]
"""Revoked certificates: the issuer in DER and the serial number of each."""


@dataclass(frozen=True)
class Certificate:
    """A minimal X.509 parser: the identity and the end of a certificate, and revocation lists. Pure.

    Signatures are not checked here. The TLS handshake has checked that of a certificate; a revocation list is a local file
    that is trusted like the file of authorities.
    """

    uris: tuple[str, ...]
    """Subject alternative names of the type URI."""
    issuer: bytes
    """Issuer in DER."""
    number: int
    """Serial number."""
    ends: float
    """End of its validity, in seconds since 1970."""

    def refusal(self, now: float, revoked: Revoked) -> str | None:
        """Return the reason why the certificate is not valid at this moment; None if it is."""
        if now > self.ends:
            return "has ended"
        if (self.issuer, self.number) in revoked:
            return "was revoked"
        return None


def read_certificate(der: bytes) -> Certificate | None:
    """Parse a certificate in DER; return None if it is not one."""
    try:
        signed = list(_elements(next(_elements(_only(der, _SEQUENCE)))[1]))
        if signed[0][0] == _VERSION:
            del signed[0]
        (kind, number), _, (_, issuer), (_, validity) = signed[:4]
        if kind != _INTEGER:
            return None
        _, (form, end) = _elements(validity)
        uris = tuple(uri for tag, content in signed if tag == _EXTENSIONS for uri in _uris(content))
        return Certificate(uris, issuer, int.from_bytes(number, "big", signed=True), _moment(form, end))
    except (IndexError, StopIteration, ValueError):
        return None


def read_revocations(pem: bytes) -> Revoked:
    """Return the certificates in the revocation lists of a file; raise ValueError if there is no valid list."""
    texts = _LIST.findall(pem)
    if not texts or len(texts) != pem.count(b"-----BEGIN "):
        raise ValueError("no revocation lists in PEM, or something else beside them")
    try:
        return frozenset(one for text in texts for one in _entries(binascii.a2b_base64(text)))
    except (IndexError, StopIteration) as error:
        raise ValueError("not what a revocation list looks like") from error


def _entries(der: bytes) -> Iterator[tuple[bytes, int]]:
    signed = list(_elements(next(_elements(_only(der, _SEQUENCE)))[1]))
    if signed[0][0] == _INTEGER:  # the version number of a list of version 2
        del signed[0]
    (_, issuer), *rest = signed[1:]
    for tag, content in rest:
        if tag == _SEQUENCE:
            for _, entry in _elements(content):
                kind, number = next(_elements(entry))
                if kind != _INTEGER:
                    raise ValueError("a revoked certificate without a number")
                yield issuer, int.from_bytes(number, "big", signed=True)
        elif tag not in (_SHORT_TIME, _LONG_TIME, _VERSION):
            raise ValueError("not what a revocation list has here")


def _uris(content: bytes) -> Iterator[str]:
    for _, extension in _elements(_only(content, _SEQUENCE)):
        (kind, name), *_, (form, value) = _elements(extension)
        if (kind, name, form) == (_OID, _SUBJECT_ALTERNATIVE_NAME, _OCTETS):
            for type, text in _elements(_only(value, _SEQUENCE)):
                if type == _URI_NAME:
                    yield text.decode("ascii")


def _moment(form: int, content: bytes) -> float:
    text = content.decode("ascii")
    if form == _SHORT_TIME:
        text = ("19" if text >= "50" else "20") + text
    found = _TIME.fullmatch(text)
    if found is None or form not in (_SHORT_TIME, _LONG_TIME):
        raise ValueError("no time of a certificate")
    return float(calendar.timegm(tuple(map(int, found.groups()))))


def _only(data: bytes, tag: int) -> bytes:
    found = list(_elements(data))
    if len(found) != 1 or found[0][0] != tag:
        raise ValueError("an element of a certificate has another type than expected")
    return found[0][1]


def _elements(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield tag and content of each element in DER. Tags of more than one byte are not supported."""
    at = 0
    while at < len(data):
        tag, length, at = data[at], data[at + 1], at + 2
        if length & 0x80:
            count = length & 0x7F
            if not 0 < count <= 4:
                raise ValueError("no length in DER")
            length, at = int.from_bytes(data[at : at + count], "big"), at + count
        if at + length > len(data):
            raise ValueError("an element is longer than what holds it")
        yield tag, data[at : at + length]
        at += length


class Role(enum.StrEnum):
    SERVER = "server"
    STORAGE = "storage"
    CLIENT = "client"
    """Role of an application."""
    OPERATOR = "operator"
    """Role of a person with `waltzctl`, and of their tools."""
    OBSERVER = "observer"
    """Role of a person or a tool that may only read the state of daemons and partitions, and no transactions."""


_URI = re.compile(r"waltz://([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})/role/([a-z]+)/([A-Za-z0-9][A-Za-z0-9._-]{0,63})")


def dns_name(key: UUID, role: Role, name: str | None = None) -> str:
    """Return the DNS name that the certificate of the called process must have."""
    return f"{name}.{role}.{key}.waltz" if name is not None else f"{role}.{key}.waltz"


@dataclass(frozen=True)
class Identity:
    key: UUID
    """Key of the cluster."""
    role: Role
    name: str

    @property
    def uri(self) -> str:
        return f"waltz://{self.key}/role/{self.role}/{self.name}"

    @property
    def dns_names(self) -> tuple[str, str]:
        return dns_name(self.key, self.role), dns_name(self.key, self.role, self.name)

    @staticmethod
    def among(names: Iterable[str]) -> Identity | None:
        """Return the identity among the names of a certificate; None if there is none or more than one."""
        found = [match for name in names if (match := _URI.fullmatch(name))]
        if len(found) != 1 or found[0][2] not in set(Role):
            return None
        return Identity(UUID(found[0][1]), Role(found[0][2]), found[0][3])

    @staticmethod
    def of_certificate(certificate: bytes) -> Identity | None:
        """Return the identity in a certificate in DER, whose signature the TLS handshake has checked."""
        found = read_certificate(certificate)
        return None if found is None else Identity.among(found.uris)

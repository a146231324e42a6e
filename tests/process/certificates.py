"""A certificate authority for tests: certificates of every role, and ones that must not be accepted."""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from waltzd.protocol.role import Identity, Role
from waltzd.wire.tls import Tls

_serial = itertools.count(1)
_HOUR, _YEAR = datetime.timedelta(hours=1), datetime.timedelta(days=365)


@dataclass(frozen=True)
class Files:
    """Paths of a certificate, its key, and who must have signed the other side's."""

    certificate: Path
    key: Path
    ca: Path

    @property
    def settings(self) -> dict[str, object]:
        """As in the configuration of a daemon."""
        return {"tls_certificate": self.certificate, "tls_key": self.key, "tls_ca": self.ca}

    def tls(self, role: Role, *, cluster: UUID | None = None) -> Tls:
        return Tls(str(self.certificate), str(self.key), str(self.ca), role=role, cluster=cluster)


_SIGNS_CERTIFICATES = x509.KeyUsage(
    digital_signature=False,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    key_cert_sign=True,
    crl_sign=True,
    encipher_only=False,
    decipher_only=False,
)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


class Authority:
    def __init__(self, home: Path) -> None:
        home.mkdir(parents=True, exist_ok=True)
        self._home = home
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(f"authority {next(_serial)}")
        self.ca = home / "ca.pem"
        builder = self._builder(self._name, self._key, left=_YEAR)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        builder = builder.add_extension(_SIGNS_CERTIFICATES, critical=True)
        self._certificate = builder.sign(self._key, hashes.SHA256())
        self.ca.write_bytes(self._certificate.public_bytes(serialization.Encoding.PEM))

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, *, left: datetime.timedelta
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(next(_serial))
            .not_valid_before(now - _YEAR)
            .not_valid_after(now + left)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
        )

    def issue(
        self, key: UUID, role: Role, name: str, *, file: str | None = None, expired: bool = False, days: float = 365
    ) -> Files:
        """One that ends in so many days, or has ended an hour ago."""
        identity, left = Identity(key, role, name), -_HOUR if expired else datetime.timedelta(days=days)
        return self.sign([identity.uri], identity.dns_names, file=file or f"{role}-{name}", left=left)

    def revoke(self, *files: Files, name: str = "revoked") -> Path:
        """A revocation list with these, in a file that is there at once."""
        now = datetime.datetime.now(datetime.UTC)
        builder = x509.CertificateRevocationListBuilder().issuer_name(self._name)
        builder = builder.last_update(now - _YEAR).next_update(now + _YEAR)
        for one in files:
            number = x509.load_pem_x509_certificate(one.certificate.read_bytes()).serial_number
            entry = x509.RevokedCertificateBuilder().serial_number(number).revocation_date(now).build()
            builder = builder.add_revoked_certificate(entry)
        path = self._home / f"{name}.pem"
        beside = path.with_suffix(".next")
        beside.write_bytes(builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
        return beside.rename(path)

    def sign(self, uris: Sequence[str], dns_names: Sequence[str], *, file: str, left: datetime.timedelta = _YEAR) -> Files:
        names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(uri) for uri in uris]
        names += [x509.DNSName(name) for name in dns_names]
        return self.sign_names(names, file=file, left=left)

    def sign_names(self, names: Sequence[x509.GeneralName], *, file: str, left: datetime.timedelta = _YEAR) -> Files:
        """Names of any type, as an authority may sign them that does not look closely."""
        key = ec.generate_private_key(ec.SECP256R1())
        builder = self._builder(_name(file), key, left=left)
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        files = Files(self._home / f"{file}.pem", self._home / f"{file}.key", self.ca)
        certificate = builder.sign(self._key, hashes.SHA256())
        files.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        files.key.unlink(missing_ok=True)
        files.key.touch(mode=0o600)
        files.key.write_bytes(
            key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        )
        return files


def mistakable(uri: str) -> dict[str, list[x509.GeneralName]]:
    """Names that have the text of this URI, and are not it."""
    dns = x509.DNSName("client.example")
    return {
        "dns": [x509.DNSName(uri)],
        "email": [x509.RFC822Name._init_without_validation(uri)],
        "nul": [dns, x509.UniformResourceIdentifier(uri + "\0.evil")],
        "longer": [dns, x509.UniformResourceIdentifier(uri + "/more")],
        "upper": [dns, x509.UniformResourceIdentifier(uri.upper())],
        "two": [x509.UniformResourceIdentifier(uri), x509.UniformResourceIdentifier(uri + "2")],
        "none": [],
    }

"""What is read of certificates and of revocation lists, against a library that reads all of them."""

from __future__ import annotations

import datetime
import ssl
from pathlib import Path

import pytest
from cryptography import x509 as library

from tests.process.certificates import Authority
from tests.process.daemon import KEY
from waltzd.protocol.role import Identity, Role, read_certificate, read_revocations


def der(path: Path) -> bytes:
    return ssl.PEM_cert_to_DER_cert(path.read_text())


@pytest.mark.parametrize("days", [-1.0, 1.0, 365 * 30, 365 * 400])
def test_a_certificate(tmp_path: Path, days: float) -> None:
    path = Authority(tmp_path).issue(KEY, Role.SERVER, "one", days=days).certificate
    twin = library.load_pem_x509_certificate(path.read_bytes())
    found = read_certificate(der(path))
    assert found is not None
    assert found.uris == (Identity(KEY, Role.SERVER, "one").uri,)
    assert found.number == twin.serial_number
    assert found.ends == twin.not_valid_after_utc.timestamp()
    assert found.refusal(found.ends, frozenset()) is None
    assert found.refusal(found.ends + 1, frozenset()) == "has ended"


def test_a_revocation_list(tmp_path: Path) -> None:
    ours, others = Authority(tmp_path / "a"), Authority(tmp_path / "b")
    files = [ours.issue(KEY, Role.CLIENT, f"c{number}") for number in range(3)]
    found = [read_certificate(der(one.certificate)) for one in files]
    now = datetime.datetime.now(datetime.UTC).timestamp()
    both = ours.revoke(files[0], files[2]).read_bytes() + others.revoke().read_bytes()
    revoked = read_revocations(both)
    assert [one.refusal(now, revoked) for one in found if one is not None] == ["was revoked", None, "was revoked"]
    assert len(revoked) == 2
    theirs = others.revoke(files[0])  # the same number, of another authority
    assert found[0] is not None
    assert found[0].refusal(now, read_revocations(theirs.read_bytes())) is None


def test_what_is_not_whole_is_nothing(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    files = authority.issue(KEY, Role.CLIENT, "c")
    whole = der(files.certificate)
    assert [size for size in range(len(whole)) if read_certificate(whole[:size]) is not None] == []
    text = authority.revoke(files).read_bytes()
    lines = text.splitlines(keepends=True)
    for wrong in (
        b"",
        text[:-10],
        text + files.certificate.read_bytes(),
        b"".join([*lines[:2], *lines[-1:]]),
        text + b"-----BEGIN ",
    ):
        with pytest.raises(ValueError, match=r"revocation list|element|certificate has|padding"):
            read_revocations(wrong)

"""Certificates from files: what is refused before it is used, and what happens when files are replaced."""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import shutil
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from uuid import UUID

import pytest
from cryptography.hazmat.primitives import serialization

from tests.process.certificates import Authority, Files, mistakable
from waltzd.errors import CannotConnect
from waltzd.errors.operations import BadConfig
from waltzd.protocol.role import Identity, Role, dns_name, read_certificate
from waltzd.wire import tls as tls_module
from waltzd.wire.tls import AGAIN_SECONDS, Tls, check_peer

KEY, OTHER = UUID("00112233-4455-6677-8899-aabbccddeeff"), UUID(int=5)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ca")


def refusal(files: Files, role: Role = Role.SERVER, cluster: UUID | None = KEY) -> str:
    with pytest.raises(BadConfig) as caught:
        files.tls(role, cluster=cluster)
    return caught.value.message


@pytest.mark.parametrize("role", list(Role))
def test_a_certificate_says_who_a_process_is(authority: Authority, role: Role) -> None:
    tls = authority.issue(KEY, role, "one.of-many").tls(role, cluster=KEY)
    assert tls.identity == Identity(KEY, role, "one.of-many")
    assert authority.issue(KEY, role, "x").tls(role).identity.key == KEY


@pytest.mark.parametrize(
    "names",
    [
        [],
        ["waltz://not-a-key/role/server/x"],
        [f"waltz://{KEY}/role/king/x"],
        [f"waltz://{KEY}/role/server/"],
        [f"waltz://{KEY}/role/server/a/b"],
        [f"waltz://{KEY}/role/server/-x"],
        [f"https://{KEY}/role/server/x"],
        [f"waltz://{KEY}/role/server/x", f"waltz://{KEY}/role/client/x"],
        [f"waltz://{KEY}/role/server/x\n"],
    ],
)
def test_what_is_no_identity(names: list[str]) -> None:
    assert Identity.among(names) is None


def test_other_names_beside_the_identity_do_not_matter() -> None:
    identity = Identity(KEY, Role.SERVER, "x")
    assert Identity.among(["host.example", identity.uri, "https://example"]) == identity
    assert identity.dns_names == (dns_name(KEY, Role.SERVER), dns_name(KEY, Role.SERVER, "x"))


def test_certificates_that_must_not_be_used(authority: Authority, tmp_path: Path) -> None:
    good = authority.issue(KEY, Role.SERVER, "one")
    other = Authority(tmp_path / "other").issue(KEY, Role.SERVER, "one")
    identity = Identity(KEY, Role.SERVER, "one")
    assert "needs the role storage" in refusal(good, Role.STORAGE)
    assert f"belongs to the cluster {KEY}, this process to {OTHER}" in refusal(good, cluster=OTHER)
    assert "expired" in refusal(authority.issue(KEY, Role.SERVER, "old", expired=True))
    assert "usable" in refusal(Files(good.certificate, other.key, good.ca))
    assert "usable" in refusal(Files(good.certificate, good.key, other.ca))
    assert "names no identity" in refusal(authority.sign([], ["server.example"], file="nobody"))
    assert "names no identity" in refusal(authority.sign([], [], file="nameless"))
    assert "cannot answer as server." in refusal(authority.sign([identity.uri], ["server.example"], file="host"))
    assert "cannot answer as one.server." in refusal(
        authority.sign([identity.uri], [identity.dns_names[0]], file="no-name")
    )
    assert "cannot read" in refusal(Files(tmp_path / "missing", good.key, good.ca))
    garbage = tmp_path / "garbage"
    garbage.write_bytes(b"-----BEGIN CERTIFICATE-----\nzzz\n")
    for files in (
        Files(garbage, good.key, good.ca),
        Files(good.certificate, garbage, good.ca),
        Files(good.certificate, good.key, garbage),
    ):
        garbage.chmod(0o600)
        assert "usable" in refusal(files)


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o602, 0o666])
def test_a_key_that_others_can_read_is_refused(authority: Authority, mode: int) -> None:
    files = authority.issue(KEY, Role.SERVER, "one")
    files.key.chmod(mode)
    assert "make it private" in refusal(files)
    files.key.chmod(0o640)
    assert files.tls(Role.SERVER).identity.name == "one"


def test_an_encrypted_key_is_refused_without_asking_anybody(authority: Authority) -> None:
    files = authority.issue(KEY, Role.SERVER, "one")
    key = serialization.load_pem_private_key(files.key.read_bytes(), None)
    form, lock = serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"secret")
    files.key.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, lock))
    assert "usable" in refusal(files)


# -- who a certificate is for ------------------------------------------------------------------------------------------


def der(files: Files) -> bytes:
    return ssl.PEM_cert_to_DER_cert(files.certificate.read_text())


@pytest.mark.parametrize("role", list(Role))
def test_a_certificate_is_read_as_it_is_written(authority: Authority, role: Role) -> None:
    assert Identity.of_certificate(der(authority.issue(KEY, role, "ann"))) == Identity(KEY, role, "ann")


@pytest.mark.parametrize("kind", sorted(mistakable("")))
def test_only_a_uri_says_who_somebody_is_and_only_exactly(authority: Authority, kind: str) -> None:
    names = mistakable(Identity(KEY, Role.OPERATOR, "eve").uri)[kind]
    assert Identity.of_certificate(der(authority.sign_names(names, file="eve"))) is None


def test_a_damaged_certificate_is_nobodys(authority: Authority) -> None:
    """Whatever is cut off or changed: an answer, and never another role or cluster."""
    whole, identity = der(authority.issue(KEY, Role.CLIENT, "ann")), Identity(KEY, Role.CLIENT, "ann")
    for size in range(len(whole)):
        assert Identity.of_certificate(whole[:size]) is None
    for at in range(len(whole)):
        for value in (0x00, 0x30, 0x80, 0x84, 0xFF):
            found = Identity.of_certificate(whole[:at] + bytes([value]) + whole[at + 1 :])
            assert found is None or found.uri == identity.uri or found.role is not Role.OPERATOR


def test_whoever_answers_must_be_what_is_meant() -> None:
    def look(found: Identity | None, name: str | None = "s1") -> None:
        check_peer(found, "a:1", key=KEY, role=Role.STORAGE, name=name)

    look(Identity(KEY, Role.STORAGE, "s1"))
    look(Identity(KEY, Role.STORAGE, "s2"), None)
    others = Identity(KEY, Role.STORAGE, "s2"), Identity(KEY, Role.SERVER, "s1"), Identity(OTHER, Role.STORAGE, "s1")
    for other in (None, *others):
        with pytest.raises(CannotConnect, match="the certificate of the process at a:1"):
            look(other)


# -- replaced files ----------------------------------------------------------------------------------------------------

_counter = itertools.count(1)


def replace(old: Path, new: Path) -> None:
    """With another time of change: on a coarse clock two writes could look like one."""
    shutil.copyfile(new, old)
    later = 1_000_000_000 + next(_counter)
    os.utime(old, (later, later))


def swap(files: Files, new: Files) -> None:
    replace(files.certificate, new.certificate)
    replace(files.key, new.key)


def test_a_replaced_certificate_is_used_when_it_is_whole(authority: Authority) -> None:
    files, new = authority.issue(KEY, Role.SERVER, "one"), authority.issue(KEY, Role.SERVER, "one", file="new")
    tls = files.tls(Role.SERVER)
    before = tls.current()
    assert tls.current() is before
    replace(files.certificate, new.certificate)
    assert tls.current() is before, "half replaced: certificate and key do not belong together"
    replace(files.key, new.key)
    after = tls.current()
    assert after.certificate == new.certificate.read_bytes()
    assert after.key == new.key.read_bytes()
    assert tls.current() is after


def open_to_all(files: Files) -> None:
    later = 1_000_000_000 + next(_counter)
    os.utime(files.key, (later, later))
    files.key.chmod(0o644)


def damages() -> dict[str, Callable[[Authority, Files], None]]:
    return {
        "gone": lambda authority, files: files.key.unlink(),
        "empty": lambda authority, files: os.truncate(files.certificate, 0),
        "expired": lambda authority, files: swap(files, authority.issue(KEY, Role.SERVER, "one", file="n", expired=True)),
        "another role": lambda authority, files: swap(files, authority.issue(KEY, Role.CLIENT, "one", file="n")),
        "another cluster": lambda authority, files: swap(files, authority.issue(OTHER, Role.SERVER, "one", file="n")),
        "open to all": lambda authority, files: open_to_all(files),
    }


@pytest.mark.parametrize("name", sorted(damages()))
def test_what_cannot_be_used_changes_nothing_and_is_said_once(
    authority: Authority, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    files = authority.issue(KEY, Role.SERVER, "one")
    tls = files.tls(Role.SERVER)
    before = tls.current()
    damages()[name](authority, files)
    with caplog.at_level(logging.INFO):
        for _ in range(5):
            assert tls.current() is before
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "stays in use" in caplog.text
    swap(files, authority.issue(KEY, Role.SERVER, "two", file="better"))
    files.key.chmod(0o600)
    assert tls.current().identity.name == "two"


def test_files_that_cannot_be_read_for_a_moment_are_tried_again(
    authority: Authority, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where no descriptor was free when a revocation list came, the certificate in it stayed valid until the next list."""
    files, other = authority.issue(KEY, Role.SERVER, "one"), authority.issue(KEY, Role.CLIENT, "app")
    tls = Tls(str(files.certificate), str(files.key), str(files.ca), role=Role.SERVER, revoked=str(authority.revoke()))
    found = read_certificate(ssl.PEM_cert_to_DER_cert(other.certificate.read_text()))
    now, tries = 0.0, 0
    monkeypatch.setattr(time, "monotonic", lambda: now)

    def no_descriptor(path: str, mode: str) -> object:
        nonlocal tries
        tries += 1
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), path)

    authority.revoke(other)
    with monkeypatch.context() as full, caplog.at_level(logging.ERROR):
        full.setattr(tls_module, "open", no_descriptor, raising=False)
        for _ in range(5):
            assert tls.refusal(found) is None
        assert tries == 1, "they are not tried at every connection"
        now += AGAIN_SECONDS
        assert tls.refusal(found) is None
        assert tries == 2
    assert [record.levelname for record in caplog.records] == ["ERROR"], "it is said once"
    now += AGAIN_SECONDS
    assert tls.refusal(found) == "was revoked"


def test_a_key_that_goes_away_while_it_is_read_is_refused(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    files = authority.issue(KEY, Role.SERVER, "one")
    tls = files.tls(Role.SERVER)
    before, read = tls.current(), tls_module._content

    def read_and_remove(path: str) -> bytes:
        content = read(path)
        if path == str(files.ca):
            files.key.unlink()
        return content

    swap(files, authority.issue(KEY, Role.SERVER, "two", file="better"))
    monkeypatch.setattr(tls_module, "_content", read_and_remove)
    assert tls.current() is before


def test_a_log_line_never_has_a_key_in_it(authority: Authority, caplog: pytest.LogCaptureFixture) -> None:
    files = authority.issue(KEY, Role.SERVER, "one")
    secret = files.key.read_text().splitlines()[1]
    with caplog.at_level(logging.DEBUG):
        tls = Tls(str(files.certificate), str(files.key), str(files.ca), role=Role.SERVER)
        files.certificate.write_bytes(files.key.read_bytes())
        tls.current()
    assert secret not in caplog.text
    assert secret not in refusal(files)


# -- read again on request ---------------------------------------------------------------------------------------------


def test_files_are_read_again_on_request_also_when_they_look_the_same(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    files, new = authority.issue(KEY, Role.SERVER, "one"), authority.issue(KEY, Role.SERVER, "one", file="new")
    tls = files.tls(Role.SERVER)
    before = tls.current()
    with caplog.at_level(logging.INFO):
        assert tls.reload() is None
    assert tls.current() is before, "channels that work are not given up for the same certificate"
    assert "it is the one that is in use" in caplog.text
    seen = [(path, os.stat(path)) for path in (files.certificate, files.key)]
    for path, other in ((files.certificate, new.certificate), (files.key, new.key)):
        path.write_bytes(other.read_bytes())
    for path, status in seen:
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert tls.reload() is None
    assert tls.current().certificate == new.certificate.read_bytes()


@pytest.mark.parametrize("name", sorted(damages()))
def test_what_is_wrong_is_said_at_every_request(authority: Authority, name: str, caplog: pytest.LogCaptureFixture) -> None:
    files = authority.issue(KEY, Role.SERVER, "one")
    tls = files.tls(Role.SERVER)
    before, answering, calling = tls.current(), tls.current().answering, tls.calling()
    damages()[name](authority, files)
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            assert isinstance(tls.reload(), BadConfig)
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"]
    assert tls.current() is before
    assert (tls.current().answering, tls.calling()) == (answering, calling)


def handshake(server: ssl.SSLContext, client: ssl.SSLContext, name: str | None) -> tuple[ssl.SSLObject, ssl.SSLObject]:
    """Both ends, in memory."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    calling = client.wrap_bio(back, there, server_hostname=name)
    answering = server.wrap_bio(there, back, server_side=True)
    for _ in range(10):
        for side in (calling, answering):
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
    answering.write(b"x")
    assert calling.read(1) == b"x"
    calling.write(b"y")
    assert answering.read(1) == b"y"
    return calling, answering


def test_an_authority_that_is_taken_away_lets_nobody_in_any_more(authority: Authority, tmp_path: Path) -> None:
    """Not by a listener that has been open all the time, and not by resuming an old session."""
    other = Authority(tmp_path / "other")
    files, caller = authority.issue(KEY, Role.STORAGE, "s1"), authority.issue(KEY, Role.SERVER, "one")
    new, new_caller = other.issue(KEY, Role.STORAGE, "s1"), other.issue(KEY, Role.SERVER, "one")
    tls = files.tls(Role.STORAGE)
    listener, name = tls.answering(), dns_name(KEY, Role.STORAGE)
    calling = caller.tls(Role.SERVER).calling()
    ours, _ = handshake(listener, calling, name)
    assert ours.session is None or not ours.session.has_ticket
    swap(files, new)
    replace(files.ca, new.ca)
    with pytest.raises(ssl.SSLError):
        handshake(listener, calling, name)
    calling.check_hostname, calling.verify_mode = False, ssl.CERT_NONE  # one who does not care who answers
    with pytest.raises(ssl.SSLError):
        handshake(listener, calling, name)
    _, theirs = handshake(listener, new_caller.tls(Role.SERVER).calling(), name)
    found = theirs.getpeercert()
    assert found is not None


def test_whoever_asks_for_no_name_is_checked_all_the_same(authority: Authority, tmp_path: Path) -> None:
    tls = authority.issue(KEY, Role.STORAGE, "s1").tls(Role.STORAGE)
    stranger = Authority(tmp_path / "other").issue(KEY, Role.SERVER, "one")
    listener = tls.answering()
    for files, is_let_in in ((stranger, False), (authority.issue(KEY, Role.SERVER, "one"), True)):
        calling = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        calling.check_hostname, calling.verify_mode = False, ssl.CERT_NONE
        calling.load_cert_chain(files.certificate, files.key)
        if is_let_in:
            handshake(listener, calling, None)
        else:
            with pytest.raises(ssl.SSLError):
                handshake(listener, calling, None)


def test_version_1_2_could_resume_a_session_and_is_refused(authority: Authority) -> None:
    tls = authority.issue(KEY, Role.STORAGE, "s1").tls(Role.STORAGE)
    calling = authority.issue(KEY, Role.SERVER, "one").tls(Role.SERVER).calling()
    calling.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError):
        handshake(tls.answering(), calling, dns_name(KEY, Role.STORAGE))

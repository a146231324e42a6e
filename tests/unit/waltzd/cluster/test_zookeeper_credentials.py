"""Who a process is to ZooKeeper: what stands in the file of credentials, and what is said of one that cannot be used."""

from __future__ import annotations

from pathlib import Path

import pytest
from kazoo.security import make_digest_acl_credential

from waltzd.cluster.zookeeper_credentials import (
    CREDENTIALS_BYTES_MAX,
    NO_CREDENTIALS,
    CoordinatorTls,
    ZooKeeperCredentials,
    load_credentials,
    read_credentials,
)
from waltzd.errors.operations import BadConfig

FIRST, SECOND = "waltz:a-long-random-password", "waltz:another:with colons"


def a_file(path: Path, text: str, mode: int = 0o600) -> str:
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)
    return str(path)


def test_documents_are_given_to_the_first_line(tmp_path: Path) -> None:
    lines = read_credentials(a_file(tmp_path / "f", f"# since May\n{FIRST}\n\nwaltz:the-old-one\n"))
    assert lines == (FIRST, "waltz:the-old-one")
    access = ZooKeeperCredentials(credentials=lines)
    assert access.owner == make_digest_acl_credential(*FIRST.split(":"))
    assert (access.has_credentials, NO_CREDENTIALS.has_credentials) == (True, False)


def test_who_only_reads_has_a_line_of_its_own(tmp_path: Path) -> None:
    text = f"{FIRST}\nread-only watch:the-secret-of-the-screen\n"
    access = load_credentials("off", credentials=a_file(tmp_path / "f", text))
    assert (access.credentials, access.readers) == ((FIRST,), ("watch:the-secret-of-the-screen",))
    assert "watch" in repr(access)
    assert "the-secret-of-the-screen" not in repr(access)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("read-only watch:password\n", "holds no credentials"),
        (f"{FIRST}\nread-only watch\n", "entry 2 is not a name and a password"),
        ("", "holds no credentials"),
        ("# only a remark\n", "holds no credentials"),
        ("waltz\n", "entry 1 is not a name and a password"),
        (f"{FIRST}\nwaltz:\n", "entry 2 is not a name and a password"),
        (":password\n", "entry 1 is not a name and a password"),
        (SECOND, "entry 1 is not a name and a password"),
        ("waltz:tab\there\n", "entry 1 is not a name and a password"),
        ("waltz:pässword\n", "not ASCII text"),
        ("waltz:" + "p" * CREDENTIALS_BYTES_MAX, "holds no credentials"),
    ],
)
def test_what_is_no_credentials_is_said_without_saying_them(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(BadConfig, match=says) as refused:
        read_credentials(a_file(tmp_path / "f", text))
    assert "password-" not in refused.value.message


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666])
def test_a_file_that_others_reach_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(BadConfig, match="chmod 600"):
        read_credentials(a_file(tmp_path / "f", FIRST, mode))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match="No such file"):
        read_credentials(str(tmp_path / "nowhere"))


def test_no_password_is_shown_by_accident() -> None:
    access = ZooKeeperCredentials(credentials=(FIRST, "waltz:the-old-one"))
    assert "waltz" in repr(access)
    assert not any(word in f"{access!r} {access}" for word in ("a-long-random-password", "the-old-one"))


def test_files_that_are_no_certificates_are_said_at_once(tmp_path: Path) -> None:
    ca = a_file(tmp_path / "ca.pem", "nonsense")
    with pytest.raises(BadConfig, match="TLS to ZooKeeper cannot be used with"):
        CoordinatorTls(ca=ca, certificate=None, key=None).check()
    with pytest.raises(BadConfig, match="No such file"):
        CoordinatorTls(ca=str(tmp_path / "nowhere"), certificate=None, key=None).check()

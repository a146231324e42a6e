"""Who may come into the console."""

from __future__ import annotations

import pytest

from waltzctl.console.site import SESSIONS_MAX, SessionAuth, hosts_of


def opened() -> tuple[SessionAuth, list[str]]:
    tokens: list[str] = []
    auth = SessionAuth(hosts=hosts_of("127.0.0.1", 8765), report=tokens.append)
    auth.begin()
    return auth, tokens


def test_a_token_opens_once_and_the_next_one_is_told() -> None:
    auth, tokens = opened()
    first = auth.enter(tokens[0])
    assert first is not None
    assert auth.enter(tokens[0]) is None
    assert len(tokens) == 2
    assert auth.enter(tokens[1]) is not None
    assert auth.session(first.cookie, first.place) == first
    assert auth.session(first.cookie, "") is None
    assert len({*tokens, first.cookie, first.place}) == len(tokens) + 2


@pytest.mark.parametrize("token", ["", "x", "ü"])
def test_nothing_else_opens(token: str) -> None:
    auth, tokens = opened()
    assert auth.enter(token) is None
    assert auth.session(token, "") is None
    assert len(tokens) == 1, "a wrong one does not use the token up"
    assert SessionAuth(hosts=frozenset()).enter("") is None, "before there is a token, nothing is one"


def test_sessions_are_bounded_and_the_one_that_asked_last_stays() -> None:
    auth, tokens = opened()
    first = auth.enter(tokens[-1])
    assert first is not None
    for _ in range(2 * SESSIONS_MAX):
        assert auth.enter(tokens[-1]) is not None
        assert auth.session(first.cookie, first.place) == first
    assert len(auth._sessions) == SESSIONS_MAX


@pytest.mark.parametrize(
    ("host", "known", "foreign"),
    [
        (
            "127.0.0.1",
            ["127.0.0.1:1", "localhost:1", "LOCALHOST:1", "[::1]:1"],
            ["127.0.0.1", "127.0.0.1:2", "evil.example:1"],
        ),
        ("::1", ["[::1]:1", "localhost:1"], ["::1:1"]),
        ("console.example", ["console.example:1"], ["localhost:1", "127.0.0.1:1", "console.example"]),
    ],
)
def test_names_of_the_console(host: str, known: list[str], foreign: list[str]) -> None:
    auth = SessionAuth(hosts=hosts_of(host, 1))
    assert all(map(auth.is_known, known))
    assert not any(map(auth.is_known, foreign))


def test_a_port_that_browsers_leave_out() -> None:
    assert SessionAuth(hosts=hosts_of("console.example", 443)).is_known("console.example")

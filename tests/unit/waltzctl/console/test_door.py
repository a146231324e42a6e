"""Who may come into the console."""

from __future__ import annotations

import pytest

from waltzctl.console.door import SESSIONS_MAX, Door, hosts_of


def opened() -> tuple[Door, list[str]]:
    tokens: list[str] = []
    door = Door(hosts=hosts_of("127.0.0.1", 8765), told=tokens.append)
    door.begin()
    return door, tokens


def test_a_token_opens_once_and_the_next_one_is_told() -> None:
    door, tokens = opened()
    first = door.enter(tokens[0])
    assert first is not None
    assert door.enter(tokens[0]) is None
    assert len(tokens) == 2
    assert door.enter(tokens[1]) is not None
    assert door.session(first.cookie, first.place) == first
    assert door.session(first.cookie, "") is None
    assert len({*tokens, first.cookie, first.place}) == len(tokens) + 2


@pytest.mark.parametrize("token", ["", "x", "ü"])
def test_nothing_else_opens(token: str) -> None:
    door, tokens = opened()
    assert door.enter(token) is None
    assert door.session(token, "") is None
    assert len(tokens) == 1, "a wrong one does not use the token up"
    assert Door(hosts=frozenset()).enter("") is None, "before there is a token, nothing is one"


def test_sessions_are_bounded_and_the_one_that_asked_last_stays() -> None:
    door, tokens = opened()
    first = door.enter(tokens[-1])
    assert first is not None
    for _ in range(2 * SESSIONS_MAX):
        assert door.enter(tokens[-1]) is not None
        assert door.session(first.cookie, first.place) == first
    assert len(door._sessions) == SESSIONS_MAX


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
    door = Door(hosts=hosts_of(host, 1))
    assert all(map(door.knows, known))
    assert not any(map(door.knows, foreign))


def test_a_port_that_browsers_leave_out() -> None:
    assert Door(hosts=hosts_of("console.example", 443)).knows("console.example")

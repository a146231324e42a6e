"""Who may come into the console, and what a form needs."""

from __future__ import annotations

import pytest

from waltzctl.console.door import SESSIONS_MAX, Door, Session, hosts_of
from waltzd.errors import ConsoleFormRefused


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
    assert door.session(first.cookie) is None
    assert len({*tokens, first.cookie, first.form, first.place}) == len(tokens) + 3


@pytest.mark.parametrize("token", ["", "x", "ü"])
def test_nothing_else_opens(token: str) -> None:
    door, tokens = opened()
    assert door.enter(token) is None
    assert door.session(token) is None
    assert len(tokens) == 1, "a wrong one does not use the token up"
    assert Door(hosts=frozenset()).enter("") is None, "before there is a token, nothing is one"


def test_where_a_certificate_was_asked_for_everybody_gets_a_session() -> None:
    door = Door(hosts=frozenset(), is_open=True)
    session = door.session("")
    assert session is not None
    assert door.session(session.cookie) == session


def test_sessions_are_bounded_and_the_one_that_asked_last_stays() -> None:
    door = Door(hosts=frozenset(), is_open=True)
    first = door.session("")
    assert first is not None
    for _ in range(2 * SESSIONS_MAX):
        door.session("")
        assert door.session(first.cookie) == first


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


GOOD = {"origin": "http://127.0.0.1:8765", "sec-fetch-site": "same-origin"}


@pytest.mark.parametrize(
    ("headers", "secret"),
    [
        (GOOD, "another"),
        (GOOD, ""),
        (GOOD | {"origin": "http://evil.example"}, "form"),
        (GOOD | {"origin": "null"}, "form"),
        (GOOD | {"sec-fetch-site": "cross-site"}, "form"),
        (GOOD | {"sec-fetch-site": "same-site"}, "form"),
    ],
)
def test_a_form_of_another_page_is_refused(headers: dict[str, str], secret: str) -> None:
    door, _ = opened()
    session = Session(cookie="cookie", form="form")
    door.check_form(session, GOOD, "form")
    door.check_form(session, {}, "form")
    with pytest.raises(ConsoleFormRefused):
        door.check_form(session, headers, secret)

"""Who may come in: a token that opens once, and behind it a session of two secrets. Pure but for the random numbers that
it draws.

A page on another site, shown by the same browser, may send requests here and must get nothing. So the name that was asked
for must be ours (or a foreign name could be pointed at this address), the cookie never travels from another site, and no
page may be shown inside another one.

Another program at another port of this machine is the second danger: a browser sends a cookie to all ports of a host. So
the pages of a session stand below a place, a secret part of their addresses, and its cookie belongs to that place: a
browser sends it nowhere else. Neither opens anything without the other.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

SESSIONS_MAX = 64
"""Browsers that are in; one more sends the one away that has not asked for longest."""
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}
"""Of every answer: nothing from outside, no script and no style but our own files, no frame."""


@dataclass(frozen=True, kw_only=True)
class Session:
    """A browser that is in."""

    cookie: str
    place: str = ""
    """First part of the path of its pages."""

    @property
    def base(self) -> str:
        """Return what the path of each of its pages begins with."""
        return f"/{self.place}" if self.place else ""


def _secret() -> str:
    return secrets.token_urlsafe(32)


@dataclass
class SessionAuth:
    hosts: frozenset[str]
    """What a browser may call this console, with the port."""
    told: Callable[[str], None] = lambda token: None
    """Gets each new token, also when the one before was used."""
    _token: str = ""
    _sessions: dict[str, Session] = field(default_factory=dict)

    def begin(self) -> None:
        self._token = _secret()
        self.told(self._token)

    def knows(self, host: str) -> bool:
        return host.lower() in self.hosts

    def enter(self, token: str) -> Session | None:
        """Open a session and tell the next token; None unless this is the newest token."""
        if not self._token or not _same(token, self._token):
            return None
        self.begin()
        made = Session(cookie=_secret(), place=_secret())
        self._sessions[made.cookie] = made
        while len(self._sessions) > SESSIONS_MAX:
            del self._sessions[next(iter(self._sessions))]
        return made

    def session(self, cookie: str, place: str) -> Session | None:
        """Return the session with this cookie, if `place` is its own."""
        found = self._sessions.get(cookie)
        if found is None or not _same(place, found.place):
            return None
        self._sessions[cookie] = self._sessions.pop(cookie)  # behind the others: it asked last
        return found

    def is_place(self, name: str) -> bool:
        return any(name == session.place for session in self._sessions.values())


def _same(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode(), other.encode())


def hosts_of(host: str, port: int) -> frozenset[str]:
    """What a browser may call a console that listens there."""
    names = {f"[{host}]" if ":" in host else host}
    if names & {"127.0.0.1", "[::1]", "localhost"}:
        names |= {"127.0.0.1", "[::1]", "localhost"}
    found = {f"{name}:{port}".lower() for name in names}
    if port in (80, 443):  # which browsers leave out
        found |= {name.lower() for name in names}
    return frozenset(found)

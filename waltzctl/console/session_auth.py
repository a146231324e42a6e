"""Authentication of console sessions: a token that works once, then a session with two secrets. Pure but for random
numbers.

First danger: a page of another site in the same browser sends requests here. So the Host header must name this console (or
a foreign name could be resolved to this address), the cookie is never sent from another site, and no page can be framed.

Second danger: another program on another port of this machine, as a browser sends a cookie to all ports of a host. So the
pages of a session have a secret first path segment, its place, and the cookie is restricted to that path. A request needs
both the place and the cookie.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

SESSIONS_MAX = 64
"""Maximum number of sessions; a further one ends the least recently used."""
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
"""Headers of every response: only our own scripts and styles, nothing from other sites, no frames."""


@dataclass(frozen=True, kw_only=True)
class Session:
    """Session of a browser."""

    cookie: str
    place: str = ""
    """Secret first segment of the path of its pages; "" for none."""

    @property
    def base(self) -> str:
        """Prefix of the paths of its pages."""
        return f"/{self.place}" if self.place else ""


def _secret() -> str:
    return secrets.token_urlsafe(32)


@dataclass
class SessionAuth:
    hosts: frozenset[str]
    """Accepted values of the Host header, in lower case."""
    report: Callable[[str], None] = lambda token: None
    """Callback for each new token: the first, and one after each use."""
    _token: str = ""
    _sessions: dict[str, Session] = field(default_factory=dict)

    def begin(self) -> None:
        self._token = _secret()
        self.report(self._token)

    def is_known(self, host: str) -> bool:
        return host.lower() in self.hosts

    def enter(self, token: str) -> Session | None:
        """Open a session and make the next token; return None unless this is the current token."""
        if not self._token or not _same(token, self._token):
            return None
        self.begin()
        made = Session(cookie=_secret(), place=_secret())
        self._sessions[made.cookie] = made
        while len(self._sessions) > SESSIONS_MAX:
            del self._sessions[next(iter(self._sessions))]
        return made

    def session(self, cookie: str, place: str) -> Session | None:
        """Return the session with this cookie if `place` is its place, else None."""
        found = self._sessions.get(cookie)
        if found is None or not _same(place, found.place):
            return None
        self._sessions[cookie] = self._sessions.pop(cookie)  # the most recently used session is last
        return found

    def is_place(self, name: str) -> bool:
        return any(name == session.place for session in self._sessions.values())


def _same(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode(), other.encode())


def hosts_of(host: str, port: int) -> frozenset[str]:
    """Return the values of the Host header that a browser may send to a console at this address."""
    names = {f"[{host}]" if ":" in host else host}
    if names & {"127.0.0.1", "[::1]", "localhost"}:
        names |= {"127.0.0.1", "[::1]", "localhost"}
    found = {f"{name}:{port}".lower() for name in names}
    if port in (80, 443):  # browsers omit default ports
        found |= {name.lower() for name in names}
    return frozenset(found)

"""The console as a web application: routes, authentication, and pages that follow the cluster.

While a browser follows a page, it is rendered after every poll, and only changed parts are sent. All data from a cluster is
text: templates escape it, and no response allows a script that is not our own file.

`SessionAuth` authenticates: a token works once, and begins a session with two secrets.

First danger: a page of another site in the same browser sends requests here. So the Host header must name this console (or
a foreign name could be resolved to this address), the cookie is never sent from another site, and no page can be framed.

Second danger: another program on another port of this machine, as a browser sends a cookie to all ports of a host. So the
pages of a session have a secret first path segment, its place, and the cookie is restricted to that path. A request needs
both the place and the cookie.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from waltzctl.console import log_pages, pages, query_pages
from waltzctl.console.pages import Make, Page, PageRequest, Part, part, tone_of
from waltzctl.console.watch import IDLE_SECONDS, Seen, Watch
from waltzctl.show.terminal import printable
from waltzd.errors import EXIT_CONFLICT, EXIT_NOT_AUTHORISED, EXIT_NOT_FOUND, EXIT_USAGE, WaltzError
from waltzd.errors.operations import ConsoleClosed, NoSuchName

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


HERE = Path(__file__).parent
QUERY_MAX = 4096
STATUS = {EXIT_USAGE: 400, EXIT_NOT_AUTHORISED: 403, EXIT_NOT_FOUND: 404, EXIT_CONFLICT: 409}
"""Exit code of an error → HTTP status; 503 for all others."""
TITLES = {404: "Not there", 503: "No answer"}
STATIC = {
    "console.css": "text/css; charset=utf-8",
    "console.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}


@dataclass(frozen=True)
class Entry:
    """Page with its path, and its name in the navigation; "" if it is only linked."""

    path: str
    make: Make
    name: str = ""


ENTRIES = (
    Entry("/", pages.now, "Now"),
    Entry("/partitions", pages.partitions, "Partitions"),
    Entry("/partitions/{name}", pages.partition),
    Entry("/transactions", log_pages.transactions, "Transactions"),
    Entry("/transactions/{name}", log_pages.transaction),
    Entry("/locks", log_pages.locks, "Locks"),
    Entry("/groups", query_pages.groups, "Groups"),
    Entry("/groups/{name}", query_pages.group),
    Entry("/clients", query_pages.clients, "Clients"),
    Entry("/storages", pages.storages, "Storages"),
    Entry("/servers", pages.servers, "Servers"),
    Entry("/archive", query_pages.archive, "Archive"),
    Entry("/history", query_pages.history, "History"),
    Entry("/events", query_pages.events, "Events"),
)


def spaced(number: object) -> str:
    return f"{number:,}" if isinstance(number, int) else str(number)


class Templates:
    """Templates with their common functions."""

    def __init__(self) -> None:
        self._env = Environment(
            loader=FileSystemLoader(HERE / "templates"),
            autoescape=True,
            undefined=StrictUndefined,
            auto_reload=False,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self.files = {name: (HERE / "static" / name).read_bytes() for name in STATIC}
        marks = {name: hashlib.sha256(data).hexdigest()[:12] for name, data in self.files.items()}
        known: dict[str, Any] = {
            "static": lambda name: f"/static/{name}?{marks[str(name)]}",
            "shape": pages.shape,
            "tone_of": tone_of,
            "address": lambda path, **query: f"{path}?{urlencode(query)}" if query else path,
        }
        self._env.globals.update(known)
        self._env.filters.update({"spaced": spaced, "printable": printable})

    def part(self, part: Part, session: Session) -> str:
        return _below(session, self._part(part))

    def page(self, session: Session, *, head: Part, parts: Sequence[Part], **given: Any) -> str:
        inside = [(part.name, self._part(part)) for part in parts]
        whole = self._env.get_template("page.html").render(head=self._part(head), parts=inside, **given)
        return _below(session, whole)

    def _part(self, part: Part) -> Markup:
        return Markup(self._env.get_template(part.template).render(**part.given))

    def closed(self, error: WaltzError) -> str:
        return self._env.get_template("closed.html").render(error=error)

    def entered(self, session: Session) -> str:
        return _below(session, self._env.get_template("entered.html").render())


_ADDRESS = re.compile(r'((?:href|action)=")/(?!static/)')


def _below(session: Session, html: str) -> str:
    """Prefix the addresses in HTML with the base of a session. Data of a cluster cannot match: its quotes are escaped."""
    return _ADDRESS.sub(lambda found: f"{found[1]}{session.base}/", html) if session.base else html


def error_part(error: WaltzError) -> Part:
    return part("error", error=error)


def status_of(error: WaltzError) -> int:
    return STATUS.get(error.exit_code, 404 if isinstance(error, NoSuchName) else 503)


class Site:
    def __init__(self, watch: Watch, auth: SessionAuth) -> None:
        self.watch, self.auth, self.templates = watch, auth, Templates()
        port = next(iter(sorted(auth.hosts))).rpartition(":")[2]
        self.cookie = f"waltz-console-{port}"
        """Name of the cookie, with the port: two consoles on one machine must not overwrite each other's."""
        routes = [Route(entry.path, self._endpoint(entry), methods=["GET"]) for entry in ENTRIES]
        routes += [
            Route("/static/{name}", self._static, methods=["GET"]),
            Route("/enter", self._enter, methods=["GET"]),
            Route("/favicon.ico", self._no_icon, methods=["GET"]),
        ]
        self.app: ASGIApp = _Guard(Starlette(routes=routes, exception_handlers={404: self._unknown}), auth)

    # -- sessions

    async def _enter(self, request: Request) -> Response:
        session = self.auth.enter(request.query_params.get("token", ""))
        if session is None:
            return self._closed()
        # Not a redirect: after a link on another site, a browser would follow it without the strict cookie.
        response = HTMLResponse(
            self.templates.entered(session), headers={"refresh": f"0; url={session.base}/", "cache-control": "no-store"}
        )
        self._give(response, session)
        return response

    def _give(self, response: Response, session: Session) -> None:
        response.set_cookie(self.cookie, session.cookie, httponly=True, samesite="strict", path=f"{session.base}/")

    def session(self, request: Request) -> Session | None:
        place = str(request.scope.get("root_path", "")).removeprefix("/")
        return self.auth.session(request.cookies.get(self.cookie, ""), place)

    def _closed(self) -> Response:
        error = ConsoleClosed("this browser has not come in yet")
        return HTMLResponse(self.templates.closed(error), status_code=403, headers={"cache-control": "no-store"})

    # -- pages

    def _endpoint(self, entry: Entry) -> Any:
        async def answer(request: Request) -> Response:
            session = self.session(request)
            if session is None:
                return self._closed()
            if request.headers.get("accept", "").startswith("text/event-stream"):
                return StreamingResponse(
                    self.follow(entry, request), media_type="text/event-stream", headers={"cache-control": "no-store"}
                )
            return await self._show(entry, request, session)

        return answer

    def _asked(self, request: Request, seen: Seen) -> PageRequest:
        query = dict(parse_qsl(str(request.url.query)[:QUERY_MAX]))
        return PageRequest(watch=self.watch, seen=seen, query=query, name=request.path_params.get("name", ""))

    async def _show(self, entry: Entry, request: Request, session: Session) -> Response:
        asked = self._asked(request, await self.watch.now())
        page, status = await self._made(entry, asked)
        return self.answer(asked, page, entry.path, session, status)

    def answer(self, asked: PageRequest, page: Page, path: str, session: Session, status: int = 200) -> Response:
        top = "/" + path.split("/")[1]
        text = self.templates.page(
            session,
            title=page.title,
            cluster=asked.snapshot.meta.name,
            head=pages.head(asked),
            parts=page.parts,
            commands=page.commands,
            entries=[(one.path, one.name, one.path == top) for one in ENTRIES if one.name],
            is_live=bool(page.polls),
            every=self.watch.every,
        )
        response = HTMLResponse(text, status_code=status, headers={"cache-control": "no-store"})
        self._give(response, session)
        return response

    async def _made(self, entry: Entry, asked: PageRequest) -> tuple[Page, int]:
        try:
            return await entry.make(asked), 200
        except WaltzError as error:
            status = status_of(error)
            title = entry.name or TITLES.get(status, "Not done")
            return Page(title=title, commands=(), parts=(error_part(error),)), status

    async def follow(self, entry: Entry, request: Request) -> AsyncIterator[str]:
        """Yield server-sent events: the changed parts as HTML after each poll, or a comment that keeps the connection
        open."""
        sent: dict[str, str] = {}
        session = self.session(request)
        assert session is not None
        rounds = 0
        yield "retry: 2000\n\n"
        async with self.watch.viewing():
            seen = self.watch.seen
            while not self.watch.is_over:
                asked = self._asked(request, seen)
                parts = [pages.head(asked)]
                page, _ = await self._made(entry, asked)
                if rounds % max(1, page.polls) == 0:
                    parts += page.parts
                changed = {}
                for part in parts:
                    html = self.templates.part(part, session)
                    mark = hashlib.sha256(html.encode()).hexdigest()
                    if sent.get(part.name) != mark:
                        sent[part.name] = mark
                        changed[part.name] = html
                yield f"data: {json.dumps(changed)}\n\n" if changed else ": quiet\n\n"
                rounds += 1
                seen = await self.watch.next(seen.number, 2 * IDLE_SECONDS)

    # -- the rest

    async def _static(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in STATIC:
            return PlainTextResponse("not found", status_code=404)
        return Response(
            self.templates.files[name],
            media_type=STATIC[name],
            headers={"cache-control": "public, max-age=31536000, immutable"},
        )

    async def _no_icon(self, _request: Request) -> Response:
        return RedirectResponse("/static/icon.svg", status_code=301)

    async def _unknown(self, request: Request, _error: Exception) -> Response:
        session = self.session(request)
        if session is None:
            return self._closed()
        asked = self._asked(request, await self.watch.now())
        path = request.url.path.removeprefix(session.base)
        error = NoSuchName(f"there is no page {path}", not_done="nothing was shown")
        page = Page(title="Not there", commands=(), parts=(error_part(error),), polls=0)
        return self.answer(asked, page, path, session, 404)


_HOST = re.compile(r"[a-z0-9.\-\[\]:]{1,255}", re.IGNORECASE)


class _Guard:
    """Middleware that checks the Host header of requests, and adds `HEADERS` to responses."""

    def __init__(self, app: ASGIApp, auth: SessionAuth) -> None:
        self._app, self._auth = app, auth

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
            await send(message)

        hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        if len(hosts) != 1 or not _HOST.fullmatch(hosts[0]) or not self._auth.is_known(hosts[0]):
            await PlainTextResponse("This console is not known by that name.", status_code=421)(scope, receive, send_with)
            return
        place = scope["path"].removeprefix("/").partition("/")[0]  # `OPTIONS *` and CONNECT have no "/"
        below = f"/{place}" if self._auth.is_place(place) else ""
        await self._app({**scope, "root_path": below}, receive, send_with)

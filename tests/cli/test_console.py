"""`waltzctl console`: a real process beside a real cluster, asked over HTTP, and looked at in a real Chromium.

What a page shows of a given snapshot is tried without any of them, in `tests/unit/waltzctl/console`.
"""

from __future__ import annotations

import json
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import httpx2
import pytest

from tests.cli.browser import ENTER, TAB, Browser, missing
from tests.cli.example import examples
from tests.json_schemas import check_output
from waltzctl.local_cluster.local import LocalCluster

Tool = Callable[..., Any]
PATIENCE_SECONDS = 60.0
NASTY = '<script>document.title = "owned"</script><img src=x onerror="document.title=\'owned\'">'
PAGES = [
    "/", "/partitions", "/partitions/0", "/transactions", "/transactions/0-0", "/locks?name=order&id=17&mark=-1",
    "/groups", "/clients", "/storages", "/servers", "/archive", "/history", "/events", "/nowhere",
]  # fmt: skip
LOOKED_AT = ["/", "/partitions", "/partitions/0", "/transactions", "/transactions/0-0", "/events", "/nowhere"]
"""By the rules of axe-core, which take long: a page of each kind."""


class Console:
    """The process, and the addresses that it prints."""

    def __init__(self, directory: Path, *more: str) -> None:
        command = [
            sys.executable, "-m", "waltzctl", "console", "--directory", str(directory), "--listen", "127.0.0.1:0",
            "-o", "json", *more,
        ]  # fmt: skip
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)

    def address(self) -> str:
        """The next one: each opens once."""
        line = self._lines.get(timeout=PATIENCE_SECONDS)
        check_output(["console"], line)
        return str(json.loads(line)["address"])

    def end(self) -> tuple[int, str]:
        assert self.process.stderr is not None
        self.process.send_signal(signal.SIGTERM)
        err = self.process.stderr.read()
        return self.process.wait(PATIENCE_SECONDS), err

    def close(self) -> None:
        self.process.kill()
        self._reader.join()
        with self.process:  # closes what it wrote to
            pass


@contextmanager
def serving(directory: Path, *more: str) -> Iterator[Console]:
    console = Console(directory, *more)
    try:
        yield console
    finally:
        console.close()


@pytest.fixture
def here(live: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cluster that tests share, with what was seen of it before forgotten."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("WALTZ_DIRECTORY", str(live.directory))
    return live.directory


def numbers(html: str) -> list[str]:
    return re.findall(r'<data value="([^"]+)">', html)


@contextmanager
def entered(console: Console) -> Iterator[httpx2.Client]:
    address = console.address()
    home = address.partition("/enter")[0]
    with httpx2.Client(base_url=home, trust_env=False, timeout=PATIENCE_SECONDS) as client:
        answer = client.get(address)
        assert answer.status_code == 200
        client.base_url = home + answer.headers["refresh"].removeprefix("0; url=")
        yield client


def test_numbers_agree_with_the_tool_and_it_ends_when_it_is_told(waltzctl: Tool, here: Path) -> None:
    waltzctl("txn", "append", "0", "hello", "--lock", "write:order:17")
    newest = json.loads(waltzctl("txn", "append", "0", NASTY, "--kind", "7", "-o", "json").out)["id"]
    assert all(words[0] == "console" for words in examples(waltzctl, ["console"]))
    with serving(here) as console:
        with entered(console) as client:
            for path in PAGES:
                answer = client.get(path)
                assert answer.status_code == (404 if path == "/nowhere" else 200), path
                assert len(answer.content) < 100_000
                assert NASTY not in answer.text
            for words, path, keys in (
                (["partition", "list"], "/partitions", ("partition", "level", "committed")),
                (["storage", "list"], "/storages", ("replicas", "free_bytes")),
                (["server", "list"], "/servers", ("open",)),
                (["archive", "status"], "/archive", ("partition", "committed", "behind")),
                (["archive", "status", "--lost-now"], "/archive", ("partition", "committed")),
            ):
                html, told = client.get(path).text, json.loads(waltzctl(*words, "-o", "json").out)
                rows = next(value for value in told.values() if isinstance(value, list))
                wanted = [str(row[key]) for row in rows for key in keys if row[key] is not None and key != "free_bytes"]
                assert len(wanted) >= 1
                for number in wanted:
                    assert number in numbers(html), (path, number)
            shown = client.get(f"/transactions/0-{newest}").text
            told = json.loads(waltzctl("txn", "get", "0", str(newest), "-o", "json").out)
            for key in ("kind", "client", "generation", "sequence", "size", "group"):
                assert str(told[key]) in numbers(shown), key
        code, err = console.end()
        assert code == 0, err
        assert err.splitlines() == ["The console of the cluster local runs until Ctrl-C. An address opens once:"]


def test_it_ends_with_who_started_it(here: Path) -> None:
    with serving(here, "--until-eof") as console:
        console.address()
        assert console.process.stdin is not None
        console.process.stdin.close()
        assert console.process.wait(PATIENCE_SECONDS) == 0


def test_where_others_would_reach_it_it_does_not_start(waltzctl: Tool, here: Path) -> None:
    told = waltzctl("console", "--listen", "0.0.0.0:0")
    assert (told.code, told.out) == (2, "")
    assert told.err.startswith("W2320 ")
    assert waltzctl("console", "--listen", "nowhere").code == 2


class Neighbour(BaseHTTPRequestHandler):
    """Another program of this machine, at another port: it keeps what browsers send it."""

    seen: ClassVar[dict[str, str | None]] = {}
    """Cookies that came, by path."""

    def do_GET(self) -> None:
        self.seen[self.path] = self.headers["cookie"]
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One for all tests: it takes long to start."""
    with Browser() as started:
        yield started


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_a_browser_sends_the_session_to_nobody_else(here: Path, browser: Browser) -> None:
    """A cookie goes to all ports of a host, and neither the cookie nor the secret of the addresses opens anything alone."""
    neighbour = HTTPServer(("127.0.0.1", 0), Neighbour)
    threading.Thread(target=neighbour.serve_forever, daemon=True).start()
    try:
        with serving(here) as console:
            browser.open(console.address())
            browser.until(lambda: "/enter" not in browser.url)
            home = browser.url.rstrip("/")
            site = home.rpartition("/")[0]
            assert "HEALTHY" in browser.text("header")
            assert browser.run("return document.cookie") == "", "no script reads it"
            browser.open(f"http://127.0.0.1:{neighbour.server_port}/")
            browser.open(f"http://127.0.0.1:{neighbour.server_port}{home.removeprefix(site)}/")
            assert Neighbour.seen["/"] is None
            assert Neighbour.seen[f"{home.removeprefix(site)}/"] is not None, "this test would notice a cookie"
            browser.open(f"{site}/")
            assert "Not in yet" in browser.text()
            other = httpx2.get(f"{home}/", trust_env=False)
            assert (other.status_code, "W2321" in other.text) == (403, True), "the address alone opens nothing"
    finally:
        neighbour.shutdown()
        neighbour.server_close()


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_in_a_browser(waltzctl: Tool, here: Path, live: LocalCluster, browser: Browser) -> None:
    """Every page, by keyboard, without scripts, and while a storage goes."""
    waltzctl("txn", "append", "0", NASTY)
    with serving(here) as console:
        address = console.address()
        browser.open(address)
        browser.until(lambda: "/enter" not in browser.url)
        home = browser.url.rstrip("/")
        place = "/" + home.rpartition("/")[2]
        browser.complaints()
        for path in PAGES:
            browser.look(is_dark=path in PAGES[::2], width=390 if path in PAGES[::3] else 1280)
            browser.open(home + path)
            if path in LOOKED_AT:
                assert browser.barriers() == [], path
            assert browser.run("return document.documentElement.scrollWidth <= innerWidth"), (
                f"{path} is as wide as the window"
            )
            said = [one["message"] for one in browser.complaints() if path != "/nowhere"]
            assert said == [], path
            assert "owned" not in browser.run("return document.title"), path
        browser.look()

        # By keyboard alone: past the head to the list of pages, on to the partitions, and into the first of them.
        browser.open(f"{home}/")
        for _ in range(30):
            browser.press(TAB)
            if browser.run("return document.activeElement.pathname") == f"{place}/partitions":
                break
        browser.press(ENTER)
        browser.until(lambda: browser.url == f"{home}/partitions")
        for _ in range(60):
            browser.press(TAB)
            if browser.run("return document.activeElement.pathname") == f"{place}/partitions/0":
                break
        browser.press(ENTER)
        browser.until(lambda: browser.url == f"{home}/partitions/0")

        # A look replaces parts, and leaves the focus where it is.
        browser.open(f"{home}/storages")
        assert "silent" not in browser.text("main")
        live.daemons["storage-2"].kill()
        browser.until(lambda: "silent" in browser.text("main") and "DEGRADED" in browser.text("header"))
        live.start_one("storage-2")
        browser.until(lambda: "silent" not in browser.text("main") and "HEALTHY" in browser.text("header"))

        browser.scripts(are_on=False)
        for path in ("/", "/partitions", "/transactions"):
            browser.open(home + path)
            assert "Without JavaScript" in browser.source or path == "/transactions"
            assert "local" in browser.source
        browser.scripts(are_on=True)

        # The console goes: the page says since when.
        browser.open(f"{home}/servers")
        console.end()
        browser.until(lambda: "does not answer since" in browser.text("#apart"))

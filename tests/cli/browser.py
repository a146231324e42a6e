"""A real Chromium without a window, driven by its own driver over HTTP: as much as the tests of the console need.

`missing()` says whether the machine has the programs for it; nothing is downloaded.
"""

from __future__ import annotations

import base64
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import axe_core_python
import httpx2

PATIENCE_SECONDS = 60.0
ARGUMENTS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-default-apps",
    "--disable-dev-shm-usage", "--hide-scrollbars",
)  # fmt: skip
_AXE = Path(axe_core_python.__file__).parent / "axe.min.js"
_SERIOUS = ("serious", "critical")
TAB, ENTER = "\ue004", "\ue007"


PROGRAMS = {"chromium": "chromium", "chromedriver": "chromium-driver"}


def missing() -> str:
    """Why there is no browser here; empty where all of it is."""
    packages = [package for program, package in PROGRAMS.items() if shutil.which(program) is None]
    return f"Debian's {', '.join(packages)} is not there" if packages else ""


class Browser:
    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._directory = tempfile.TemporaryDirectory()
        self._driver = subprocess.Popen(
            [str(shutil.which("chromedriver")), f"--port={port}", "--silent"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": self._directory.name},
        )
        self._http = httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_SECONDS, trust_env=False)
        self._session = ""

    def __enter__(self) -> Self:
        def is_ready() -> bool:
            try:
                return bool(self._http.get("/status").json()["value"]["ready"])
            except httpx2.TransportError:
                return False

        self.until(is_ready)
        options = {
            "args": [*ARGUMENTS, f"--user-data-dir={self._directory.name}/profile"],
            "binary": str(shutil.which("chromium")),
        }
        wanted = {"alwaysMatch": {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}}
        made = self._http.post("/session", json={"capabilities": wanted}).json()["value"]
        self._session = f"/session/{made['sessionId']}"
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if self._session:
                self._http.delete(self._session)
        finally:
            self._http.close()
            self._driver.terminate()
            self._driver.wait()
            self._directory.cleanup()

    def until(self, holds: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE_SECONDS
        while not holds():
            assert time.monotonic() < end, "it did not come in time"
            time.sleep(0.05)

    def _do(self, what: str, **given: Any) -> Any:
        answer = self._http.post(f"{self._session}/{what}", json=given).json()["value"]
        assert not (isinstance(answer, dict) and "error" in answer), answer
        return answer

    def _ask(self, what: str) -> Any:
        return self._http.get(f"{self._session}/{what}").json()["value"]

    def open(self, url: str) -> None:
        self._do("url", url=url)

    @property
    def url(self) -> str:
        return str(self._ask("url"))

    @property
    def source(self) -> str:
        return str(self._ask("source"))

    def run(self, script: str, *arguments: Any) -> Any:
        """JavaScript in the page, what it returns."""
        return self._do("execute/sync", script=script, args=list(arguments))

    def wait_for(self, script: str, *arguments: Any) -> Any:
        """JavaScript that ends later, by calling its last argument."""
        return self._do("execute/async", script=script, args=list(arguments))

    def text(self, selector: str = "body") -> str:
        return str(self.run("return (document.querySelector(arguments[0]) || {innerText: ''}).innerText", selector))

    def press(self, *keys: str) -> None:
        """On the keyboard, wherever the focus is."""
        actions = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self._do("actions", actions=[{"type": "key", "id": "keys", "actions": actions}])

    def protocol(self, name: str, **given: Any) -> Any:
        """A command of the protocol of its tools for developers."""
        return self._do("goog/cdp/execute", cmd=name, params=given)

    def look(self, *, width: int = 1280, height: int = 900, is_dark: bool = False, is_phone: bool = False) -> None:
        """As a person has it: the size of the window, and light or dark."""
        self.protocol(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=is_phone
        )
        features = [{"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}]
        self.protocol("Emulation.setEmulatedMedia", features=features)

    def scripts(self, *, are_on: bool) -> None:
        self.protocol("Emulation.setScriptExecutionDisabled", value=not are_on)

    def barriers(self) -> list[tuple[str, str]]:
        """What keeps people out, by the rules of axe-core: which rule, and the first element."""
        self.run(_AXE.read_text(encoding="utf-8"))
        found = self.wait_for("axe.run({resultTypes: ['violations']}).then(arguments[0])")
        return [(one["id"], one["nodes"][0]["html"]) for one in found["violations"] if one["impact"] in _SERIOUS]

    def picture(self, path: Path) -> None:
        """Of the whole page."""
        size = self.protocol("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        shot = self.protocol("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(shot["data"]))

    def complaints(self) -> Sequence[Mapping[str, Any]]:
        """What the browser wrote into its console since the last time: also what the policy of a page has refused."""
        found: list[Mapping[str, Any]] = self._do("se/log", type="browser")
        return found

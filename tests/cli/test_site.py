"""`./dev docs`: the site builds without a warning, and its API reference has every name that applications import."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import waltzd
import waltzd.dcb
import waltzd.sql
import waltzd.testing
from tests import site
from tests.release.packages import ROOT, project_version

ROOMS = (waltzd, waltzd.dcb, waltzd.sql, waltzd.testing)
"""What applications import from."""


class Page(HTMLParser):
    """Names and links of a page of the site."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.names = set[str]()
        self.links: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value for name, value in attrs if value}
        self.names |= {found[name] for name in ("id", "name") if name in found}
        self.links += [found[name] for name in ("href", "src") if name in found]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    result = site.build(folder)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "warning" not in (result.stdout + result.stderr).lower()
    return folder / "site"


def test_every_public_name_is_in_the_api_reference() -> None:
    shown = {name for names in site.API.values() for name in names}
    public = {f"{room.__name__}.{name}" for room in ROOMS for name in room.__all__}
    assert public - shown == {"waltzd.WaltzError"}  # it is on the page of errors


@pytest.mark.long  # it takes a quarter of a minute; `./dev docs` fails at a warning, too
def test_the_site_is_built_without_a_warning_and_has_every_name(built: Path) -> None:
    for title, names in site.API.items():
        page = (built / site.slug(title).removesuffix(".md") / "index.html").read_text(encoding="utf-8")
        for name in names:
            assert f'id="{name}"' in page, f"{name} is not on the page {title!r}"
    found = re.findall(r"^- \[.+\]\((.+)\)$", (built / "llms.txt").read_text(encoding="utf-8"), re.M)
    assert len(found) == sum(len(pages) for _, pages in site.menu()), "programs find every page in one file"
    assert [name for name in found if not (built / name / "index.html").is_file()] == []
    page = (built / "api-clients" / "index.html").read_text(encoding="utf-8")
    for face in ("Client", "BlockingClient"):
        for method in ("append", "append_many", "read", "flush", "close"):
            assert f'id="waltzd.{face}.{method}"' in page


@pytest.mark.long  # it shares the site with the test above
def test_every_link_of_the_site_leads_somewhere(built: Path) -> None:
    pages = {path: Page(path) for path in built.rglob("*.html") if path.name != "404.html"}
    dead = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            there = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            there = there / "index.html" if there.is_dir() else there
            names = pages[there].names if there in pages else set()
            if not there.exists() or (parts.fragment and there in pages and unquote(parts.fragment) not in names):
                dead.append(f"{path.relative_to(built)}: {link}")
    assert dead == []
    assert len(pages) > 90
    assert f"Waltz {project_version()}" in (built / "index.html").read_text(encoding="utf-8"), "it says what it describes"


def test_a_warning_fails_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site, "API", {"Nothing": ("waltzd.no_such_thing",)})
    monkeypatch.setattr(site, "sources", list)
    monkeypatch.setattr(site, "menu", lambda: [(site.REFERENCE, [("Nothing", site.slug("Nothing"))])])
    assert site.build(tmp_path).returncode != 0


def test_every_page_of_docs_is_in_the_menu() -> None:
    listed = {page for _, pages in site.menu() for _, page in pages}
    decisions = {f"decisions/{path.name}" for path in (ROOT / "docs/decisions").glob("*.md")}
    assert {site.page_of(path) for path in site.sources()} - {site.MENU} <= listed | decisions
    listed_decisions = set(re.findall(r"\]\(([\w-]+\.md)\)", (ROOT / "docs/decisions/README.md").read_text()))
    assert decisions == {f"decisions/{name}" for name in listed_decisions | {"README.md"}}


def test_links_into_the_repository_become_words() -> None:
    source = ROOT / "docs" / "metrics.md"
    assert site.rewritten("[rules](../configs/alert-rules.yml)", source) == "rules (`configs/alert-rules.yml`)"
    assert (
        site.rewritten("[start](../README.md#try-it) [x](format.md)", source) == "[start](index.md#try-it) [x](format.md)"
    )
    assert not re.search(r"\]\(\.\.", site.rewritten(source.read_text(encoding="utf-8"), source))
    below = ROOT / "docs" / "how-to" / "health.md"
    assert site.rewritten("[m](../metrics.md#x) [start](../../README.md) [t](testing.md)", below) == (
        "[m](../metrics.md#x) [start](../index.md) [t](testing.md)"
    )

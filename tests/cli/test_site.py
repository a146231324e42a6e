"""`./dev docs`: the site builds without a warning, and its API reference has every name that applications import."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import waltzd
import waltzd.dcb
import waltzd.sql
import waltzd.testing
from tests import site

ROOMS = (waltzd, waltzd.dcb, waltzd.sql, waltzd.testing)
"""What applications import from."""


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


def test_a_warning_fails_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site, "API", {"Nothing": ("waltzd.no_such_thing",)})
    monkeypatch.setattr(site, "sources", list)
    monkeypatch.setattr(site, "menu", lambda: [(site.REFERENCE, [("Nothing", site.slug("Nothing"))])])
    assert site.build(tmp_path).returncode != 0


def test_every_page_of_docs_is_in_the_menu() -> None:
    listed = {page for _, pages in site.menu() for _, page in pages}
    decisions = {f"decisions/{path.name}" for path in (site.ROOT / "docs/decisions").glob("*.md")}
    assert {site.page_of(path) for path in site.sources()} - {site.MENU} <= listed | decisions
    listed_decisions = set(re.findall(r"\]\(([\w-]+\.md)\)", (site.ROOT / "docs/decisions/README.md").read_text()))
    assert decisions == {f"decisions/{name}" for name in listed_decisions | {"README.md"}}


def test_links_into_the_repository_become_words() -> None:
    source = site.ROOT / "docs" / "metrics.md"
    assert site.rewritten("[rules](../configs/alert-rules.yml)", source) == "rules (`configs/alert-rules.yml`)"
    assert (
        site.rewritten("[start](../README.md#try-it) [x](format.md)", source) == "[start](index.md#try-it) [x](format.md)"
    )
    assert not re.search(r"\]\(\.\.", site.rewritten(source.read_text(encoding="utf-8"), source))
    below = site.ROOT / "docs" / "how-to" / "health.md"
    assert site.rewritten("[m](../metrics.md#x) [start](../../README.md) [t](testing.md)", below) == (
        "[m](../metrics.md#x) [start](../index.md) [t](testing.md)"
    )

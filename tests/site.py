"""The documentation as a site, with an API reference made from the docstrings: `./dev docs`.

Pages are written to be read in the repository, so links lead to files there. For the site they are copied: README and
ARCHITECTURE become pages, and a link to any other file of the repository becomes the path of that file. The menu is
`docs/README.md`. A warning of the builder fails the build.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.release.packages import ROOT, project_version

SITE = ROOT / "build" / "site"
PAGES = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "reporting.md",
}
"""Files of the root that are pages of the site. `docs/README.md` is the menu, and the page of the menu."""
MENU = "documentation.md"

API = {
    "Clients": (
        "waltzd.Client",
        "waltzd.BlockingClient",
        "waltzd.ClientSettings",
        "waltzd.Tls",
        "waltzd.ClientStatus",
        "waltzd.PartitionStatus",
        "waltzd.Serializer",
    ),
    "Transactions": (
        *("waltzd.Transaction", "waltzd.Command", "waltzd.FeedMode", "waltzd.View", "waltzd.Builder"),
        "waltzd.Decision",
        "waltzd.PositionFile",
    ),
    "Locks and outcomes": (
        *("waltzd.Lock", "waltzd.read_lock", "waltzd.write_lock", "waltzd.append_lock", "waltzd.LoggedLock"),
        "waltzd.History",
        *("waltzd.Outcome", "waltzd.AppendOutcome", "waltzd.Committed", "waltzd.Rejected", "waltzd.Declined"),
        *("waltzd.Unknown", "waltzd.Reason", "waltzd.Outcomes", "waltzd.Token", "waltzd.Position"),
    ),
    "Serializers": (
        *("waltzd.serializers.EventType", "waltzd.serializers.Json", "waltzd.serializers.JsonEvents"),
        *("waltzd.serializers.PydanticEvents", "waltzd.serializers.MsgspecEvents"),
    ),
    "Event store": (
        *("waltzd.dcb.EventStore", "waltzd.dcb.BlockingEventStore", "waltzd.dcb.Event", "waltzd.dcb.Query"),
        *("waltzd.dcb.QueryItem", "waltzd.dcb.AppendCondition", "waltzd.dcb.ReadResult", "waltzd.dcb.SequencedEvent"),
    ),
    "Consumer groups": (
        *("waltzd.Delivery", "waltzd.Subscription", "waltzd.Handling", "waltzd.Reject"),
        *("waltzd.BlockingDelivery", "waltzd.BlockingSubscription", "waltzd.BlockingHandling", "waltzd.sql.SqlInbox"),
        *("waltzd.GroupStatus", "waltzd.ParkedTransaction"),
    ),
    "SQL views": ("waltzd.sql.SqlView", "waltzd.sql.SqlCommand", "waltzd.sql.Poison", "waltzd.sql.sqlite"),
    "Observing": ("waltzd.observe.metrics", "waltzd.observe.traces"),
    "Testing": ("waltzd.testing.LocalCluster", "waltzd.testing.BlockingCluster", "waltzd.testing.plugin"),
    "Errors": ("waltzd.errors",),
}
"""What applications import, a page each: `tests/cli/test_site.py` asks that every public name is on one."""
REFERENCE = "Look it up"
"""The group of the menu in which these pages stand."""

LINK = re.compile(r"\[([^\]]*)\]\(([^)#:]+)(#[^)]*)?\)")
CONFIGURATION = """\
[project]
site_name = "Waltz {version}"
site_description = "A distributed write-ahead log with optimistic locks."
docs_dir = "pages"
site_dir = "site"
nav = {nav}

[project.theme]
font = false
features = ["navigation.sections", "navigation.top", "toc.follow", "content.code.copy"]

[project.plugins.search]

[project.plugins.mkdocstrings.handlers.python]
paths = [{root}]

[project.plugins.mkdocstrings.handlers.python.options]
docstring_style = "google"
filters = ["!^_", "!^check$"]
members_order = "source"
inherited_members = true
merge_init_into_class = true
separate_signature = true
show_if_no_docstring = true
show_root_heading = true
show_root_full_path = false
show_signature_annotations = true
show_source = false
"""


def page_of(path: Path) -> str | None:
    """What the site calls a file of the repository, or none if it is no page."""
    name = path.relative_to(ROOT).as_posix()
    if name == "docs/README.md":
        return MENU
    return PAGES.get(name) or (name.removeprefix("docs/") if name.startswith("docs/") and path.suffix == ".md" else None)


def sources() -> list[Path]:
    """Every file of the repository that is a page."""
    return [*(ROOT / name for name in PAGES), *sorted((ROOT / "docs").rglob("*.md"))]


def rewritten(text: str, source: Path) -> str:
    """The text of a page with its links as the site needs them."""
    here = Path(page_of(source) or "").parent

    def link(found: re.Match[str]) -> str:
        words, target, anchor = found[1], (source.parent / found[2]).resolve(), found[3] or ""
        page = page_of(target)
        if page is not None:
            return f"[{words}]({os.path.relpath(page, here)}{anchor})"
        name = str(target.relative_to(ROOT))
        return words if name == words.strip("`") else f"{words} (`{name}`)"

    return LINK.sub(link, text)


def slug(title: str) -> str:
    return "api-" + title.lower().replace(" ", "-") + ".md"


def title_of(page: Path) -> str:
    heading = page.read_text(encoding="utf-8").partition("\n")[0]
    assert heading.startswith("# "), f"{page.name} begins with no heading"
    return heading.removeprefix("# ").replace("`", "")


def menu() -> list[tuple[str, list[tuple[str, str]]]]:
    """The groups of `docs/README.md` with their pages in order; the API reference stands in one of them."""
    source = ROOT / "docs" / "README.md"
    groups: list[tuple[str, list[tuple[str, str]]]] = []
    for line in source.read_text(encoding="utf-8").splitlines():
        if line.startswith("**"):
            groups.append((line.strip("*"), []))
        for _, target, _ in LINK.findall(line):
            page = page_of((source.parent / target).resolve())
            if groups and page is not None:
                groups[-1][1].append((title_of((source.parent / target).resolve()), page))
    dict(groups)[REFERENCE] += [(f"API: {title}", slug(title)) for title in API]
    return groups


def overview(groups: list[tuple[str, list[tuple[str, str]]]]) -> str:
    """Return `llms.txt`: what Waltz is, and every page with its address, for programs that read a site."""
    parts = [f"# Waltz {project_version()}\n\n> A distributed write-ahead log with optimistic locks.\n"]
    for name, pages in groups:
        addresses = [(words, re.sub(r"(index|README)?\.md$", "", page) or "./") for words, page in pages]
        links = [f"- [{words}]({address})\n" for words, address in addresses]
        parts.append(f"\n## {name}\n\n{''.join(links)}")
    return "".join(parts)


def nav(groups: list[tuple[str, list[tuple[str, str]]]]) -> str:
    def entries(pages: list[tuple[str, str]]) -> str:
        return ", ".join(f'{{"{words}" = "{page}"}}' for words, page in pages)

    return "[\n" + "".join(f'  {{"{name}" = [{entries(pages)}]}},\n' for name, pages in groups) + "]"


def write_sources(folder: Path) -> None:
    """Everything that the builder reads, below `folder`."""
    pages = folder / "pages"
    shutil.rmtree(folder, ignore_errors=True)
    pages.mkdir(parents=True)
    for source in sources():
        name = page_of(source)
        assert name is not None
        (pages / name).parent.mkdir(parents=True, exist_ok=True)
        (pages / name).write_text(rewritten(source.read_text(encoding="utf-8"), source), encoding="utf-8")
    for title, names in API.items():
        text = "\n\n".join([f"# {title}", *(f"::: {name}" for name in names)])
        (pages / slug(title)).write_text(text + "\n", encoding="utf-8")
    (pages / "llms.txt").write_text(overview(menu()), encoding="utf-8")
    configuration = CONFIGURATION.format(version=project_version(), nav=nav(menu()), root=f'"{ROOT}", "{ROOT / "spark"}"')
    (folder / "zensical.toml").write_text(configuration, encoding="utf-8")


def build(folder: Path) -> subprocess.CompletedProcess[str]:
    """Makes the site in `folder`/site. A warning is a failure."""
    write_sources(folder)
    program = Path(sys.executable).with_name("zensical")
    return subprocess.run([program, "build", "--strict"], cwd=folder, capture_output=True, text=True, check=False)


def main() -> int:
    built = build(SITE)
    if built.returncode:
        print(built.stdout, built.stderr, sep="\n", file=sys.stderr)
        print(
            f"The site was not built. Next: mend what stands above, then ./dev docs again. Its sources are in {SITE}.",
            file=sys.stderr,
        )
        return 1
    print(f"The site is in {SITE / 'site'}; its first page is {SITE / 'site' / 'index.html'}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())

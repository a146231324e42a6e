"""`docs/commands.md` is fresh, and has every command with every option."""

from __future__ import annotations

from tests import command_page
from tests.unit import test_outside


def test_the_page_of_commands_is_fresh() -> None:
    assert command_page.PAGE.read_text(encoding="utf-8") == command_page.page(), "it is stale: run ./dev generate"


def test_every_command_has_an_entry_with_its_options() -> None:
    text = command_page.page()
    common, _, entries = text.partition("## waltzctl\n")
    for line in test_outside.commands():
        words, _, names = line.partition(":")
        entry = entries.partition(f"### `waltzctl {words}`\n")[2].partition("\n### ")[0]
        assert entry, f"{words} has no entry"
        for name in [name for name in names.split() if name.startswith("-")]:
            assert name in entry or name in common, f"{words} {name}"
    for daemon in ("storage", "server", "zookeeper"):
        assert f"### `waltzd {daemon}`\n" in entries


def test_markdown_leaves_placeholders_as_they_are() -> None:
    assert command_page.escaped("like <a|b> and *, but `<c> *` is code") == "like &lt;a|b> and \\*, but `<c> *` is code"

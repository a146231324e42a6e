"""Tables of pages: the tool's columns, with shapes, links and values for programs."""

from __future__ import annotations

import pytest

from tests.unit.snapshots import offline, partition, silent, storage, well
from waltzctl.console.pages import GridStyle, Tone, grid, listed, tone_of, tone_of_outcome
from waltzctl.show import cluster
from waltzctl.show.forms import Column, objects
from waltzd.errors import CannotConnect


@pytest.mark.parametrize(
    ("state", "tone"),
    [
        ("open", Tone.GOOD),
        ("LIVE", Tone.GOOD),
        ("up, draining", Tone.WARN),
        ("up, damaged", Tone.BAD),
        ("silent (W4001)", Tone.BAD),
        (["leader", "draining"], Tone.WARN),
        (["leader"], Tone.GOOD),
        ("voting", Tone.WARN),
        ("gone", Tone.OFF),
        ("never heard of", Tone.WARN),
    ],
)
def test_what_a_state_means(state: object, tone: Tone) -> None:
    assert tone_of(state) is tone


def test_a_change_that_failed_is_bad_whatever_it_says() -> None:
    assert [tone_of_outcome(one) for one in ("done", "begun", "W4001 away")] == [Tone.GOOD, Tone.WARN, Tone.BAD]


def test_cells_have_the_text_of_the_terminal_and_the_value_of_json() -> None:
    found = cluster.partitions(well(partitions=(partition(0), partition(1))))
    made = listed("Partitions", found, GridStyle(wide={"format", "generation"}))
    told = objects(found.columns, found.rows)
    keys = [head.key for head in made.heads]
    assert keys == ["partition", "state", "owner", "replicas", "level", "committed", "format", "generation"]
    for row, said in zip(made.rows, told, strict=True):
        for key, cell in zip(keys, row, strict=True):
            assert cell.number == (said[key] if isinstance(said[key], int) else None)
    assert made.rows[0][keys.index("committed")].text == "99"


def test_wide_columns_appear_where_they_say_something() -> None:
    look = GridStyle(wide={"trouble"})
    assert "trouble" not in [head.name for head in listed("", cluster.storages(well()), look).heads]
    ill = well(storages=(silent(storage("s1"), CannotConnect("gone")),))
    made = listed("", cluster.storages(ill), look)
    assert made.heads[-1].name == "trouble"
    assert made.rows[0][-1].text == "gone"


def test_links_shapes_and_what_is_left_out() -> None:
    look = GridStyle(links={"partition": lambda view: f"/p/{view.partition}"}, tones={"state": tone_of}, without={"owner"})
    made = listed("", cluster.partitions(offline(s1=(0,), s2=(0,))), look)
    assert "owner" not in [head.name for head in made.heads]
    first = made.rows[0]
    assert (first[0].href, first[1].tone, first[1].shape) == ("/p/0", Tone.WARN, "▲")


def test_what_would_move_a_cursor_is_spelled_out() -> None:
    made = grid("", (Column("text"),), [{"text": "a\u202eb\x1b[31m"}])
    assert made.rows[0][0].text == "a\\u202eb\\x1b[31m"

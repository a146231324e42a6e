"""Tables of pages: the tool's columns, with shapes, links and values for programs.

Drawings: where the lines go, and what is said of them.
"""

from __future__ import annotations

import re

import pytest

from tests.unit.snapshots import offline, partition, silent, storage, well
from waltzctl.console.pages import (
    HEIGHT,
    MARK_X,
    POINTS_MAX,
    TOP,
    WIDTH,
    Cursor,
    GridStyle,
    Line,
    Tone,
    cursors,
    grid,
    lines,
    listed,
    tone_of,
    tone_of_outcome,
)
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


def points(drawn: str, number: int) -> list[tuple[str, float, float]]:
    path = re.findall(r'class="line line-(\d)" d="([^"]*)"', drawn)[number][1]
    return [(kind, float(x), float(y)) for kind, x, y in re.findall(r"([ML])([\d.-]+) ([\d.-]+)", path)]


def test_the_newest_is_at_the_right_and_the_most_at_the_top() -> None:
    drawn = str(lines([0.0, 300.0, 600.0], [Line("tx", [0.0, 5.0, 10.0])], seconds=600.0, label="throughput"))
    assert points(drawn, 0) == [("M", 0.0, HEIGHT), ("L", WIDTH / 2, (HEIGHT + TOP) / 2), ("L", WIDTH, TOP)]
    assert 'aria-label="throughput"' in drawn


def test_what_is_not_known_is_a_hole() -> None:
    drawn = str(lines([0.0, 1.0, 2.0, 3.0], [Line("p50", [1.0, None, 1.0, 2.0])], seconds=3.0, label=""))
    assert [kind for kind, _, _ in points(drawn, 0)] == ["M", "M", "L"]


def test_nothing_at_all_can_be_drawn() -> None:
    assert points(str(lines([], [Line("tx", [])], seconds=1.0, label="")), 0) == []
    assert "no replica is known" in cursors([])


def test_a_label_is_text() -> None:
    assert "<script>" not in lines([], [], seconds=1.0, label='"><script>')
    assert "<script>" not in cursors([Cursor("<script>", 0, True)])


def test_cursors_stand_further_left_the_more_they_lack() -> None:
    drawn = str(cursors([Cursor("s1", 0, True), Cursor("s2", 10, True), Cursor("s3", 10**12, False)]))
    places = [float(x) for x in re.findall(r'cx="([\d.]+)"', drawn)]
    assert MARK_X > places[0] > places[1] > places[2] > 0
    assert re.findall(r'circle class="(\w+)"', drawn) == ["counts", "counts", "apart"]
    assert "s1 level, s2 10 behind, s3 1,000,000,000,000 behind" in drawn


def test_a_line_has_few_points_and_all_its_peaks() -> None:
    times = [float(at) for at in range(600)]
    values = [1000.0 if at == 333 else float(at % 7) for at in range(600)]
    drawn = points(str(lines(times, [Line("tx", values)], seconds=600.0, label="")), 0)
    assert len(drawn) <= POINTS_MAX + 2
    assert min(y for _, _, y in drawn) == TOP
    later = [at + 2 for at in times]
    again = points(str(lines(later, [Line("tx", values)], seconds=600.0, label="")), 0)
    assert len(again) <= POINTS_MAX + 2

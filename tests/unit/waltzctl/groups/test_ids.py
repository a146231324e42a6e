"""Ids that are typed for groups: what no message can carry is refused by name, not by a traceback."""

from __future__ import annotations

import pytest

from tests.unit.typed_command import typed_command
from waltzctl.groups.parked import IDS_MAX, _typed
from waltzctl.groups.position import _ids, resume
from waltzd.errors import BadArgument
from waltzd.format.layout import ID_MAX

HUGE = ID_MAX + 1


def test_an_id_above_63_bits_is_refused() -> None:
    assert _ids(f"{ID_MAX}", [0], "--after") == {0: ID_MAX}
    assert _typed(f"0:{ID_MAX}") == (0, [ID_MAX])
    for text in (f"{HUGE}", f"0={HUGE}"):
        with pytest.raises(BadArgument, match="no id is above"):
            _ids(text, [0], "--after")
    for text in (f"0:{HUGE}", f"0:0-{HUGE}", f"0:{HUGE}-{HUGE + 1}"):
        with pytest.raises(BadArgument, match="no id is above"):
            _typed(text)
    with pytest.raises(BadArgument, match="no id is above"):
        resume(entry=HUGE, command=typed_command())


def test_a_range_of_more_than_the_ids_of_one_command_is_refused() -> None:
    assert len(_typed(f"0:1-{IDS_MAX}")[1]) == IDS_MAX
    for text in (f"0:0-{IDS_MAX}", f"0:0-{ID_MAX}", f"0:1-{IDS_MAX},{IDS_MAX + 1}"):
        with pytest.raises(BadArgument, match="more than 100,000 ids at once"):
            _typed(text)

"""`waltzctl group describe`: the timelines of the partitions that a group works on."""

from __future__ import annotations

import io
from uuid import UUID

from rich.console import Console

from waltzctl.groups.command import group_page
from waltzctl.snapshot.groups import GroupPartitionView, Groups, GroupView
from waltzd.cluster.groups import GroupMeta
from waltzd.protocol.groups import GroupPartitionStatus, Mode
from waltzd.protocol.timelines import NEVER_FORKED

FORKED = NEVER_FORKED.forked(
    identity=UUID(int=2), fork=11, session=5, cause="partition rescue", began="2026-01-01T00:00:00Z", who="ann"
)


def at(partition: int, *, is_forked: bool) -> GroupPartitionView:
    place = GroupPartitionStatus(partition, epoch=1, reach=11, floor=11, open=0, parked=0, stopped="")
    return GroupPartitionView(place=place, owner="a", committed=20, timelines=FORKED.later if is_forked else ())


def test_the_timelines_of_a_forked_partition_are_named() -> None:
    meta = GroupMeta(name="mailer", partitions=None, mode=Mode.QUEUE)
    view = GroupView(meta=meta, made_at=1, partitions=(at(0, is_forked=False), at(1, is_forked=True)))
    page = group_page(view, Groups(groups=(view,), silent={}, behind={}))
    out = io.StringIO()
    page.draw(Console(file=out, width=100))
    text = " ".join(out.getvalue().split())
    assert "partition 1, timeline 2: begun by partition rescue at 2026-01-01T00:00:00Z (ann) in session 5" in text
    assert "partition 0, timeline" not in text
    ((number, timelines),) = page.document["timelines"].items()
    assert (number, [one["fork"] for one in timelines]) == (1, [11])

"""What an owner believes of a storage that has uploaded."""

from __future__ import annotations

from dataclasses import replace
from uuid import UUID

import pytest

from waltzd.cluster.cluster import said
from waltzd.errors.operations import BadFrame
from waltzd.protocol.descriptions import Archived
from waltzd.protocol.timelines import NEVER_FORKED
from waltzd.server.session.archive import check, meta_of

KNOWN = Archived(archive=UUID(int=1), number=3, sha256=64 * "a", last_id=29)
NEXT = Archived(archive=UUID(int=1), number=4, sha256=64 * "b", last_id=39)


def test_an_archive_goes_on_by_one_manifest_of_committed_ids() -> None:
    check(KNOWN, KNOWN, 50, NEVER_FORKED, is_trimmed=False)
    check(NEXT, KNOWN, 39, NEVER_FORKED, is_trimmed=False)
    check(replace(NEXT, number=1), Archived(), 39, NEVER_FORKED, is_trimmed=False)
    check(NEXT, Archived(), 39, NEVER_FORKED, is_trimmed=True)
    with pytest.raises(BadFrame):
        check(NEXT, Archived(), 39, NEVER_FORKED, is_trimmed=False)
    assert said(meta_of(NEXT, 0)) == NEXT
    for wrong in (
        replace(NEXT, number=5),
        replace(NEXT, number=3),
        replace(NEXT, last_id=29),
        replace(NEXT, last_id=40),
        replace(NEXT, archive=UUID(int=2)),
        replace(NEXT, archive=None),
    ):
        with pytest.raises(BadFrame, match="a storage made"):
            check(wrong, KNOWN, 39, NEVER_FORKED, is_trimmed=True)

"""What is looked at before a cluster is made."""

from __future__ import annotations

import pytest

from tests.unit import snapshots
from waltzctl.placement.creation import check_formats
from waltzd.errors.operations import FormatUnknown
from waltzd.protocol.descriptions import StorageDescription


def said(formats: tuple[int, ...], version: str) -> StorageDescription:
    found = snapshots.storage("one", formats=formats, version=version).reported
    assert found is not None
    return found


def test_a_storage_that_is_too_old_for_a_format_is_named_with_its_version() -> None:
    new, old = said((0, 1), "0.2.0"), said((0,), "0.1.0")
    check_formats({"one": new, "two": old}, 0)
    check_formats({"one": new}, 1)
    with pytest.raises(FormatUnknown, match=r"three, two cannot write format 1: their versions are 0\.1\.0"):
        check_formats({"one": new, "two": old, "three": old}, 1)

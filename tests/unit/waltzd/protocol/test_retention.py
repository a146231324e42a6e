"""Policies of what storages keep."""

import pytest

from waltzd.cluster.documents import Keep, keep_of


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("all", Keep()),
        ("30m", Keep(seconds=1800)),
        ("12h", Keep(seconds=43_200)),
        ("7d", Keep(seconds=604_800)),
        ("2w", Keep(seconds=1_209_600)),
        ("500GB", Keep(size=500_000_000_000)),
        ("2TiB", Keep(size=2 << 40)),
        ("64KiB", Keep(size=64 << 10)),
        ("1KB", Keep(size=1000)),
    ],
)
def test_a_policy_says_what_stays(text: str, meant: Keep) -> None:
    assert keep_of(text) == meant


@pytest.mark.parametrize(
    "text", ["", "All", "0d", "07d", "7", "d", "7 d", "-1h", "1.5GB", "7D", "500gb", "1000000d", "7dd", "7d\n", "٧d", "1iB"]
)
def test_anything_else_is_no_policy(text: str) -> None:
    assert keep_of(text) is None

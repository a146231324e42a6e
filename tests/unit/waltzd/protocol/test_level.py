"""Which versions work on one cluster: the rule, over every pair of releases that it is asked about."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from waltzd.errors.operations import IncompatibleVersion, LevelUnknown
from waltzd.protocol.level import LEVELS, OLDEST, RELEASE, THIS, Program, release_of

PROJECT = tomllib.loads((Path(__file__).parents[4] / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_the_release_of_the_rule_is_that_of_the_package() -> None:
    assert release_of(PROJECT["version"]) == RELEASE
    assert max(LEVELS) == RELEASE
    assert list(LEVELS.values()) == list(range(THIS.level + 1)), "each level begins in one release"


def test_a_version_without_a_number_is_the_oldest() -> None:
    assert [release_of(text) for text in ("0.1.0", "1.12.3rc1", "0.10", "", "7", "unknown")] == [
        (0, 1), (1, 12), (0, 10), OLDEST, OLDEST, OLDEST,
    ]  # fmt: skip


def test_a_newer_version_supports_at_least_our_level() -> None:
    assert [THIS.level_of(version) for version in ("", "0.0.7", "0.1.0", "0.2.0", "3.0")] == [
        0,
        0,
        1,
        THIS.level,
        THIS.level,
    ]


def test_a_cluster_of_a_newer_level_is_refused_by_its_level() -> None:
    for level in range(THIS.level + 1):
        THIS.check_level(level, "/")
    with pytest.raises(LevelUnknown, match=r"/: the cluster has level \d+; this version of Waltz, 0.1, supports"):
        THIS.check_level(THIS.level + 1, "/")


@pytest.mark.parametrize(
    ("ours", "theirs", "works"),
    [
        ((0, 1), "0.0.0", True),
        ((0, 1), "", True),
        ((0, 1), "0.1.5", True),
        ((0, 1), "0.2.0", True),
        ((0, 1), "0.3.0", False),
        ((0, 2), "", False),
        ((0, 3), "0.1.9", False),
        ((0, 9), "1.0.0", True),
        ((1, 0), "0.9.0", True),
        ((0, 9), "1.1.0", False),
        ((1, 1), "0.9.0", False),
        ((1, 4), "3.0.0", False),
    ],
)
def test_processes_of_a_cluster_differ_by_one_minor_version(ours: tuple[int, int], theirs: str, works: bool) -> None:
    program = Program(ours, {(0, 0): 0})
    for check in (program.check_server, lambda name, version: program.check_storage(name, version, 0)):
        if works:
            check("two", theirs)
            continue
        with pytest.raises(IncompatibleVersion, match=r"two runs version .*at most one minor version") as refused:
            check("two", theirs)
        assert "docs/upgrade.md" in refused.value.detail_next_step


def test_a_storage_must_support_the_level_of_the_cluster() -> None:
    THIS.check_storage("s1", "", 0)
    THIS.check_storage("s1", "0.1.0", 1)
    for version, shown in (("0.0.0", "0.0.0"), ("", "before 0.1")):
        with pytest.raises(
            IncompatibleVersion, match=f"storage s1 runs version {shown}, .*level 1, which needs version 0.1"
        ):
            THIS.check_storage("s1", version, 1)


def test_clients_are_of_the_same_major_version() -> None:
    for version in ("", "0.0.1", "0.1.0", "0.40.2"):
        THIS.check_client(version)
    with pytest.raises(IncompatibleVersion, match=r"version 1\.0\.0, and this server 0\.1: their major") as refused:
        THIS.check_client("1.0.0")
    assert "0.x" in refused.value.detail_next_step

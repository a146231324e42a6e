"""The settings of a server: what is accepted, what is refused and in which words."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from waltzd.daemon import config_file
from waltzd.daemon.config import ServerConfig, partitions_of
from waltzd.daemon.config_file import show
from waltzd.daemon.settings import declared
from waltzd.errors import BadConfig
from waltzd.format.layout import PARTITIONS_MAX
from waltzd.format.record import OVERHEAD_BYTES
from waltzd.protocol.address import Address

ROOT = Path(__file__).parents[4]
NEEDED = "name: one\ncoordinator: 127.0.0.1:2181\n"
USUAL = ServerConfig(name="one", coordinator="127.0.0.1:2181")


def parse(text: str) -> ServerConfig:
    return config_file.parse(text, ServerConfig, source="server.yml")


def problem(text: str) -> str:
    with pytest.raises(BadConfig) as caught:
        parse(text)
    return caught.value.message


def test_only_the_name_and_the_coordinator_must_be_given() -> None:
    assert parse(NEEDED) == USUAL
    assert (USUAL.listen, USUAL.admin_listen) == (Address("127.0.0.1", 55180), Address("127.0.0.1", 55181))
    assert (USUAL.cluster, USUAL.preferred_partitions) == ("/waltz", ())
    said = problem("")
    assert "name is missing" in said
    assert "coordinator is missing" in said


def test_what_is_shown_can_be_loaded_again() -> None:
    found = parse(NEEDED + "preferred: 0,4-7\ncluster: /waltz/production\nadvertise: '[::1]:5'\nsession_seconds: 40\n")
    assert found.preferred_partitions == (0, 4, 5, 6, 7)
    assert parse(show(found)) == found


def test_the_sample_file_is_a_valid_file_that_changes_no_default() -> None:
    text = (ROOT / "configs/server.yml").read_text()
    sample = parse(text)
    assert sample == ServerConfig(name=sample.name, coordinator=sample.coordinator)
    commented_in = "\n".join(
        line.removeprefix("# ")
        for line in text.splitlines()
        if line.removeprefix("# ").partition(":")[0] in declared(ServerConfig)
    )
    assert parse(commented_in).preferred_partitions == (0, 4, 5, 6, 7)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("cluster: waltz", "line 3: cluster: 'waltz' is not a path; write it as in /waltz"),
        ("cluster: /", "line 3: cluster: '/' is not a path"),
        ("cluster: /waltz/", "line 3: cluster: '/waltz/' is not a path"),
        ("cluster: /waltz/../other", "line 3: cluster: '/waltz/../other' is not a path"),
        ("preferred: 1,two", "line 3: preferred: 'two' is neither a number nor a range; write partitions as in 0,4-7"),
        ("preferred: 7-4", "line 3: preferred: '7-4' is neither a number nor a range"),
        ("preferred: 65536", "line 3: preferred: '65536' is beyond 65535, the highest number of a partition"),
        ("preferred: 0-99999", "line 3: preferred: '0-99999' is beyond 65535"),
        ("listen: 0.0.0.0:55180", "advertise: nobody can connect to 0.0.0.0; say which address applications are to use"),
        ("listen: '[::]:55180'", "advertise: nobody can connect to ::"),
        ("advertise: 0.0.0.0:55180", "line 3: advertise: nobody can connect to 0.0.0.0:55180"),
        ("advertise: server:0", "line 3: advertise: nobody can connect to server:0"),
        ("admin_listen: 127.0.0.1:55180", "line 3: admin_listen: 127.0.0.1:55180 is also the address of `listen`"),
        ("session_seconds: 61", "line 3: session_seconds: 61 is above the maximum, 60"),
        ("payload_bytes_max: 16MiB", "line 3: payload_bytes_max: 16MiB is above the maximum, 16777176"),
        (
            "inflight_bytes_max: 1MiB",
            "inflight_bytes_max: 1MiB cannot hold one transaction and one frame; raise it to 4MiB",
        ),
        ("storage_second: 3", "line 3: storage_second is not a setting; did you mean storage_seconds?"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(line: str, said: str) -> None:
    assert said in problem(NEEDED + line)


@pytest.mark.parametrize("name", ["", "a/b", "..", "-one", "a" * 65, "with space", "ä"])
def test_a_name_is_a_part_of_a_path(name: str) -> None:
    assert "name" in problem(f"name: '{name}'\ncoordinator: 127.0.0.1:2181\n")


@pytest.mark.parametrize("hosts", ["127.0.0.1", "a:1,", "a:1,,b:2", "a:1;b:2", "a:1/root"])
def test_every_address_of_the_coordinator_is_looked_at(hosts: str) -> None:
    assert "line 2: coordinator" in problem(f"name: one\ncoordinator: '{hosts}'\n")
    assert parse("name: one\ncoordinator: a:1, b:2\n").coordinator == "a:1, b:2"


def test_the_message_limit_lets_the_largest_transaction_travel() -> None:
    for found in (
        USUAL,
        ServerConfig(name="one", coordinator="a:1", payload_bytes_max=15 << 20, locks_max=100_000),
        ServerConfig(name="one", coordinator="a:1", frame_bytes_max=1 << 10),
    ):
        assert found.message_bytes_max >= found.payload_bytes_max + OVERHEAD_BYTES + 9 * found.locks_max
        assert found.message_bytes_max >= found.frame_bytes_max


@given(st.text("0123456789,- ", max_size=12))
def test_any_text_is_partitions_or_a_problem(text: str) -> None:
    with contextlib.suppress(ValueError):
        found = partitions_of(text)
        assert list(found) == sorted(set(found))
        assert all(0 <= number < PARTITIONS_MAX for number in found)

"""Settings: what is accepted, what is refused and in which words, and the files that are made from the declarations."""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import replace
from pathlib import Path
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from waltzd.cluster.zookeeper_credentials import NO_CREDENTIALS
from waltzd.daemon import config, config_file
from waltzd.daemon.config import (
    BATCH_OVERHEAD_BYTES,
    MESSAGE_OVERHEAD_BYTES,
    DaemonConfig,
    ServerConfig,
    StorageConfig,
    partitions_of,
)
from waltzd.daemon.config_file import TEXT_BYTES_MAX, resolved, show
from waltzd.daemon.settings import declared, format_size, parse_size
from waltzd.errors.operations import BadConfig
from waltzd.format.batch import GROUPS_BYTES_MAX
from waltzd.format.layout import PARTITIONS_MAX
from waltzd.format.record import OVERHEAD_BYTES
from waltzd.protocol.address import Address

ROOT = Path(__file__).parents[4]
KEY = UUID("00112233-4455-6677-8899-aabbccddeeff")


NEEDED = "name: one\ncoordinator: 127.0.0.1:2181\n"
USUAL = ServerConfig(name="one", coordinator="127.0.0.1:2181")


def parse(text: str) -> StorageConfig:
    return config_file.parse(text, StorageConfig)


def parse_server(text: str) -> ServerConfig:
    return config_file.parse(text, ServerConfig)


def load(path: str) -> StorageConfig:
    return config_file.load(path, StorageConfig)


def problem(text: str, kind: type[DaemonConfig] = StorageConfig) -> str:
    """What the user is told."""
    with pytest.raises(BadConfig) as caught:
        config_file.parse(text, kind, source=f"{kind.role}.yml")
    return caught.value.message


# -- accepted ----------------------------------------------------------------------------------------------------------


def test_defaults() -> None:
    found = parse("directory: /data")
    assert found == StorageConfig(directory="/data")
    assert (found.listen, found.admin_listen) == (Address("127.0.0.1", 55280), Address("127.0.0.1", 55281))
    assert (found.cluster_key, found.partitions) == (None, None)
    assert found.segment_bytes_max == 64 * 1024 * 1024


def test_an_archive_is_a_place() -> None:
    with pytest.raises(BadConfig, match="archive: ftp://a names no store"):
        parse_server(NEEDED + "archive: ftp://a\n")
    for text in ("ftp://host/x", "s3://"):
        with pytest.raises(BadConfig, match=f"archive: {text} names no store"):
            parse(f"directory: d\narchive: {text}\n")


def test_every_setting_can_be_given() -> None:
    found = parse(
        f"""
        # a comment
        directory: "/data/with space"
        name: s1
        listen: '[::1]:55300'
        admin_listen: storage-1.example:55301
        tls_certificate: /etc/waltz/storage.pem
        tls_key: /etc/waltz/storage.key
        tls_ca: /etc/waltz/ca.pem
        tls_revoked: /etc/waltz/revoked.pem
        http_tls: on
        otlp_endpoint: http://127.0.0.1:4318
        plaintext: anywhere
        stream_port: 55302
        http_listen: 10.0.0.1:55303
        cluster_key: {KEY}
        partitions: 16
        segment_bytes_max: 1GB
        record_bytes_max: 8 MiB
        frame_bytes_max: 65536
        queue_bytes_max: 32mib
        read_chunk_bytes: 1_000_000
        free_bytes_min: 0
        reserve_bytes: 64KiB
        flush_threads: 2
        archive: s3://bucket/folder
        archive_key: /etc/waltz/archive.key
        archive_unsigned: accepted
        drain_seconds: 0
        scrub_seconds: 86400
        log_format: json
        log_level: debug
        audit_file: /var/log/waltz/audit.log
        audit_bytes_max: 1MiB
        audit_files_max: 3
        """.replace("\n        ", "\n")
    )
    assert found == StorageConfig(
        directory="/data/with space",
        name="s1",
        listen=Address("::1", 55300),
        stream_port=55302,
        admin_listen=Address("storage-1.example", 55301),
        archive="s3://bucket/folder",
        archive_key="/etc/waltz/archive.key",
        archive_unsigned="accepted",
        http_listen=Address("10.0.0.1", 55303),
        cluster_key=KEY,
        partitions=16,
        tls_certificate="/etc/waltz/storage.pem",
        tls_key="/etc/waltz/storage.key",
        tls_ca="/etc/waltz/ca.pem",
        tls_revoked="/etc/waltz/revoked.pem",
        http_tls="on",
        otlp_endpoint="http://127.0.0.1:4318",
        plaintext="anywhere",
        segment_bytes_max=10**9,
        record_bytes_max=8 << 20,
        frame_bytes_max=1 << 16,
        queue_bytes_max=32 << 20,
        read_chunk_bytes=10**6,
        free_bytes_min=0,
        reserve_bytes=1 << 16,
        flush_threads=2,
        drain_seconds=0,
        scrub_seconds=86_400,
        log_format="json",
        log_level="debug",
        audit_file="/var/log/waltz/audit.log",
        audit_bytes_max=1 << 20,
        audit_files_max=3,
    )
    assert len(declared(StorageConfig)) == len(dataclasses.fields(StorageConfig)) == 33
    assert parse(show(found)) == found


@pytest.mark.parametrize(
    ("text", "directory"),
    [("directory: yes", "yes"), ("directory: 0777", "0777"), ("directory: 1:30", "1:30"), ("directory: 'null'", "null")],
)
def test_text_is_taken_as_it_stands(text: str, directory: str) -> None:
    """YAML would make true, 511 and 90 of these."""
    assert parse(text).directory == directory
    assert parse(show(parse(text))).directory == directory


def test_an_empty_value_means_none_where_none_is_possible() -> None:
    assert parse("directory: /data\npartitions:\ncluster_key: null").partitions is None


def test_both_daemon_addresses_may_leave_the_port_to_the_system() -> None:
    parse("directory: /data\nlisten: 127.0.0.1:0\nadmin_listen: 127.0.0.1:0")


def test_the_message_limit_lets_the_largest_record_travel() -> None:
    usual = StorageConfig(directory="/data")
    overhead = MESSAGE_OVERHEAD_BYTES + BATCH_OVERHEAD_BYTES
    assert usual.message_bytes_max == usual.record_bytes_max + overhead
    small = StorageConfig(directory="/data", record_bytes_max=1024, frame_bytes_max=1024)
    assert small.message_bytes_max == GROUPS_BYTES_MAX + overhead
    large = StorageConfig(directory="/data", frame_bytes_max=32 << 20)
    assert large.message_bytes_max == large.frame_bytes_max + overhead


@given(st.integers(0, 1 << 50))
def test_sizes_are_spelled_as_they_are_read(size: int) -> None:
    assert parse_size(format_size(size)) == size


def test_sizes_are_spelled_short() -> None:
    assert [format_size(size) for size in (0, 1, 1024, 1536, 64 << 20, 10**9)] == [
        "0",
        "1",
        "1KiB",
        "1536",
        "64MiB",
        "1000000000",
    ]


# -- refused -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("segment_byte_max: 1", "segment_byte_max is not a setting; did you mean segment_bytes_max?"),
        ("segment-bytes-max: 1", "segment-bytes-max is not a setting; did you mean segment_bytes_max?"),
        ("adminListen: a:1", "adminListen is not a setting; did you mean admin_listen?"),
        ("zebra: 1", "zebra is not a setting"),
        ("partitions: four", "partitions: 'four' is not a whole number"),
        ("partitions: 1.5", "partitions: '1.5' is not a whole number"),
        ("partitions: 0", "partitions: 0 is below the minimum, 1"),
        ("partitions: 65537", "partitions: 65537 is above the maximum, 65536"),
        ("segment_bytes_max: 1000", "segment_bytes_max: 1000 is below the minimum, 1KiB"),
        ("segment_bytes_max: 2TiB", "segment_bytes_max: 2TiB is above the maximum, 1TiB"),
        ("segment_bytes_max: -1", "segment_bytes_max: '-1' is not a size; write a number of bytes, or with a unit"),
        ("segment_bytes_max: 64 megs", "segment_bytes_max: '64 megs' is not a size"),
        ("segment_bytes_max: [1]", "segment_bytes_max must be one value, not a list or a mapping"),
        ("segment_bytes_max: {a: [1, {b: c}]}", "segment_bytes_max must be one value, not a list or a mapping"),
        ("segment_bytes_max: ~", "segment_bytes_max has no value; give it one, or leave the line out for the default"),
        ("directory: /twice", "directory is given twice; the first time in line 1"),
        ("cluster_key: 123", "cluster_key: '123' is not a UUID"),
        ("listen: 55280", "listen: '55280' is not an address; write host:port"),
        ("listen: host:70000", "listen: 'host:70000' is not an address; write host:port"),
        ("listen: '::1:5'", "listen: '::1:5' is not an address; write host:port"),
        ("log_level: no", "log_level: 'no' is not one of debug, info, warning, error"),
        ("log_format: TEXT", "log_format: 'TEXT' is not one of text, json"),
        ("admin_listen: 127.0.0.1:55280", "admin_listen: 127.0.0.1:55280 is also the address of `listen`"),
        ("http_listen: 127.0.0.1:55280", "http_listen: 127.0.0.1:55280 is also the address of `listen`"),
        ("http_listen: 127.0.0.1:70\nstream_port: 70", "http_listen: 127.0.0.1:70 is also the address of `stream_port`"),
        ("flush_threads: !!int 3", "flush_threads: tags (tag:yaml.org,2002:int) are not used"),
        ("flush_threads: *four", "flush_threads: aliases (*four) are not followed"),
        ("[a]: b", "a key must be a plain word"),
        ("just words", "this is not YAML"),
        ("a: b: c", "this is not YAML"),
        ("log_format: 'text", "this is not YAML"),
        ("log_format: \x07", "there is a character that YAML does not allow"),
        ("---\ndirectory: /other", "a second document starts here"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(line: str, said: str) -> None:
    message = problem(f"directory: /data\n{line}\n")
    assert message.startswith("storage.yml")
    where = "line 3" if "'text" in line or line == "just words" else "line 2"
    assert f"{where}: {said}" in message


def test_a_missing_setting_is_explained() -> None:
    for text in ("", "# nothing\n", "---\n", "directory:\n"):
        assert "directory" in problem(text)
    assert problem("") == f"storage.yml: directory is missing. {declared(StorageConfig)['directory'][1].doc}"
    assert "line 1: directory has no value; give it one" in problem("directory:\n")
    assert "line 1: directory: it must not be empty" in problem("directory: ' '\n")


def test_all_problems_are_told_at_once_in_order_of_their_lines() -> None:
    message = problem("listn: 1\nflush_threads: 0\nlog_level: loud\npartitions: many\n")
    assert [line.split(": ")[0].strip() for line in message.splitlines()[1:]] == [
        "directory is missing. Directory for the files of this storage. Only one process can use it at a time. "
        "It is created if it does not exist.",
        "line 1",
        "line 2",
        "line 3",
        "line 4",
    ]
    assert message.splitlines()[0] == "storage.yml has 5 problems:"


@pytest.mark.parametrize("text", ["- a\n- b", "words", "17", "[" * 60_000, "a: " + "[" * 20_000, "{" * 20_000])
def test_something_else_than_settings_is_refused(text: str) -> None:
    assert "storage.yml" in problem(text)


def test_aliases_cannot_multiply() -> None:
    levels = "\n".join(f"x{n}: &x{n} [{', '.join([f'*x{n - 1}'] * 9)}]" for n in range(1, 9))
    assert "x8 is not a setting" in problem(f"x0: &x0 [lol]\n{levels}\ndirectory: /data")


@given(st.text(max_size=200))
def test_any_text_is_settings_or_a_problem(text: str) -> None:
    with contextlib.suppress(BadConfig):
        parse(text)


# -- files -------------------------------------------------------------------------------------------------------------


def test_loading_names_the_file_and_the_line(tmp_path: Path) -> None:
    path = tmp_path / "storage.yml"
    path.write_text("directory: /data\n")
    assert load(str(path)) == StorageConfig(directory="/data")
    wrong = [(b"\n\n# \xff\n", "line 3: the file is not UTF-8"), (b"#" * (TEXT_BYTES_MAX + 1), "is larger than 64KiB")]
    for content, said in wrong:
        path.write_bytes(content)
        with pytest.raises(BadConfig, match=said) as caught:
            load(str(path))
        assert str(path) in caught.value.message
    for missing in (tmp_path / "nothing.yml", tmp_path):
        with pytest.raises(BadConfig, match="cannot read the configuration file") as caught:
            load(str(missing))
        assert "Not done: the daemon was not started" in caught.value.lines()
        assert caught.value.lines()[-1].startswith("Next: ")


@pytest.mark.parametrize("name", sorted(config.FILES))
def test_generated_files_are_fresh(name: str) -> None:
    made = config.FILES[name]()
    assert (ROOT / name).read_text(encoding="utf-8") == made, f"{name} is stale: run ./dev generate"


SAMPLE_STORAGE = StorageConfig(
    directory="/var/lib/waltz/storage",
    name="s1",
    http_listen=Address("127.0.0.1", 55282),
    cluster_key=KEY,
    partitions=16,
    tls_certificate="/etc/waltz/storage.pem",
    tls_key="/etc/waltz/storage.key",
    tls_ca="/etc/waltz/ca.pem",
    tls_revoked="/etc/waltz/revoked.pem",
    audit_file="/var/log/waltz/audit.log",
    otlp_endpoint="http://127.0.0.1:4318",
    archive="/mnt/archive",
    archive_key="/etc/waltz/archive.key",
)
SAMPLE_SERVER = ServerConfig(
    name="server-1",
    coordinator="127.0.0.1:2181",
    coordinator_tls_certificate="/etc/waltz/zookeeper-client.pem",
    coordinator_tls_key="/etc/waltz/zookeeper-client.key",
    coordinator_tls_ca="/etc/waltz/zookeeper-ca.pem",
    coordinator_credentials="/etc/waltz/zookeeper.credentials",
    http_listen=Address("127.0.0.1", 55182),
    archive="/mnt/archive",
    archive_key="/etc/waltz/archive.key",
    archive_cache="/var/cache/waltz",
    advertise=Address("server-1.example", 55180),
    preferred="0,4-7",
    tls_certificate="/etc/waltz/server.pem",
    tls_key="/etc/waltz/server.key",
    tls_ca="/etc/waltz/ca.pem",
    tls_revoked="/etc/waltz/revoked.pem",
    audit_file="/var/log/waltz/audit.log",
    otlp_endpoint="http://127.0.0.1:4318",
)


@pytest.mark.parametrize(
    ("usual", "whole"),
    [(StorageConfig(directory="/var/lib/waltz/storage"), SAMPLE_STORAGE), (replace(USUAL, name="server-1"), SAMPLE_SERVER)],
    ids=lambda found: found.role,
)
def test_the_sample_file_is_a_valid_file_that_changes_no_default(usual: DaemonConfig, whole: DaemonConfig) -> None:
    """Also with every example taken in."""
    kind = type(usual)
    text = (ROOT / f"configs/{kind.role}.yml").read_text()
    assert config_file.parse(text, kind) == usual
    bare = [line.removeprefix("# ") for line in text.splitlines()]
    assert config_file.parse("\n".join(line for line in bare if line.partition(":")[0] in declared(kind)), kind) == whole


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ("coordinator_tls: host\n", "coordinator_tls: it needs the authorities that sign for ZooKeeper"),
        ("coordinator_tls_key: k\n", "coordinator_tls_certificate: it is missing"),
        ("coordinator_tls_certificate: c\n", "coordinator_tls_key: it is missing"),
        ("coordinator_tls: maybe\n", "'maybe' is not one of off, host, authority"),
        ("http_tls: on\n", "http_tls: it needs a certificate"),
        ("otlp_endpoint: 127.0.0.1:4318\n", "otlp_endpoint: 127.0.0.1:4318 is not an address of HTTP"),
        ("coordinator_open: perhaps\n", "'perhaps' is not one of refused, accepted"),
    ],
)
def test_the_way_to_zookeeper_is_whole(more: str, says: str) -> None:
    assert says in problem(NEEDED + more, ServerConfig)


def test_zookeeper_is_shown_the_daemons_own_certificate_unless_it_has_another() -> None:
    own = ServerConfig(name="a", coordinator="z:1", tls_certificate="c", tls_key="k", tls_ca="ca", coordinator_tls="host")
    with pytest.raises(BadConfig, match="TLS to ZooKeeper cannot be used with c, k, ca"):
        _ = own.access
    other = replace(own, coordinator_tls_certificate="c2", coordinator_tls_key="k2", coordinator_tls_ca="ca2")
    with pytest.raises(BadConfig, match="TLS to ZooKeeper cannot be used with c2, k2, ca2"):
        _ = other.access
    assert replace(own, coordinator_tls="off").access == NO_CREDENTIALS


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.8.9.10:1", "'[::1]:1'", "localhost:1"])
def test_this_machine_needs_no_certificate(address: str) -> None:
    assert parse(f"directory: /data\nlisten: {address}").tls_certificate is None


@pytest.mark.parametrize("address", ["0.0.0.0:1", "'[::]:1'", "10.0.0.1:1", "storage-1:1", "localhost.example:1"])
@pytest.mark.parametrize("name", ["listen", "admin_listen"])
def test_other_machines_are_let_in_with_certificates_or_on_request_only(address: str, name: str) -> None:
    text = f"directory: /data\n{name}: {address}\n"
    assert "line 2: " in problem(text)
    assert "can be reached from other machines" in problem(text)
    parse(text + "plaintext: anywhere")
    parse(text + "tls_certificate: a\ntls_key: b\ntls_ca: c")


@pytest.mark.parametrize("given", ["tls_certificate", "tls_key", "tls_ca"])
def test_the_three_files_of_a_certificate_go_together(given: str) -> None:
    assert "go together" in problem(f"directory: /data\n{given}: a")


def test_a_revocation_list_needs_certificates() -> None:
    assert "no caller has a certificate" in problem("directory: /data\ntls_revoked: a")


def test_the_values_in_force_are_shown_with_what_is_default() -> None:
    text = show(StorageConfig(directory="/data", segment_bytes_max=1 << 20))
    assert "segment_bytes_max: 1MiB\n" in text
    assert "flush_threads: 4  # default\n" in text
    assert resolved(StorageConfig(directory="/data"))["segment_bytes_max"] == "64MiB"


# -- of a server -------------------------------------------------------------------------------------------------------


def test_only_the_name_and_the_coordinator_must_be_given() -> None:
    assert parse_server(NEEDED) == USUAL
    assert (USUAL.listen, USUAL.admin_listen) == (Address("127.0.0.1", 55180), Address("127.0.0.1", 55181))
    assert (USUAL.cluster, USUAL.preferred_partitions) == ("/waltz", ())
    said = problem("", ServerConfig)
    assert "name is missing" in said
    assert "coordinator is missing" in said


def test_what_is_shown_of_a_server_can_be_loaded_again() -> None:
    lines = "preferred: 0,4-7\ncluster: /waltz/production\nadvertise: '[::1]:5'\nsession_seconds: 40\n"
    found = parse_server(NEEDED + lines)
    assert found.preferred_partitions == (0, 4, 5, 6, 7)
    assert parse_server(show(found)) == found


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
        (
            "listen: 0.0.0.0:55180",
            "advertise: no client can connect to 0.0.0.0; set the address that applications connect to",
        ),
        ("listen: '[::]:55180'", "advertise: no client can connect to ::"),
        ("advertise: 0.0.0.0:55180", "line 3: advertise: no client can connect to 0.0.0.0:55180"),
        ("advertise: server..example:5", "line 3: advertise: 'server..example:5' is not an address: server..example is"),
        ("advertise: server:0", "line 3: advertise: no client can connect to server:0"),
        ("admin_listen: 127.0.0.1:55180", "line 3: admin_listen: 127.0.0.1:55180 is also the address of `listen`"),
        ("http_listen: 127.0.0.1:55181", "http_listen: 127.0.0.1:55181 is also the address of `admin_listen`"),
        ("http_listen: 0.0.0.0:55180", "http_listen: 0.0.0.0:55180 is also the address of `listen`"),
        (
            "http_listen: 10.0.0.1:7\nlisten: 10.0.0.1:7\nplaintext: anywhere",
            "http_listen: 10.0.0.1:7 is also the address of `listen`",
        ),
        ("session_seconds: 61", "line 3: session_seconds: 61 is above the maximum, 60"),
        ("payload_bytes_max: 16MiB", "line 3: payload_bytes_max: 16MiB is above the maximum, 16777176"),
        (
            "inflight_bytes_max: 1MiB",
            "inflight_bytes_max: 1MiB cannot hold one transaction and one frame; raise it to 4MiB",
        ),
        ("storage_second: 3", "line 3: storage_second is not a setting; did you mean storage_seconds?"),
    ],
)
def test_what_is_wrong_with_a_server_is_said_with_its_line(line: str, said: str) -> None:
    assert said in problem(NEEDED + line, ServerConfig)


@pytest.mark.parametrize("name", ["", "a/b", "..", "-one", "a" * 65, "with space", "ä"])
def test_a_name_is_a_part_of_a_path(name: str) -> None:
    assert "name" in problem(f"name: '{name}'\ncoordinator: 127.0.0.1:2181\n", ServerConfig)


@pytest.mark.parametrize("hosts", ["127.0.0.1", "a:1,", "a:1,,b:2", "a:1;b:2", "a:1/root"])
def test_every_address_of_the_coordinator_is_looked_at(hosts: str) -> None:
    assert "line 2: coordinator" in problem(f"name: one\ncoordinator: '{hosts}'\n", ServerConfig)
    assert parse_server("name: one\ncoordinator: a:1, b:2\n").coordinator == "a:1, b:2"


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


def test_http_may_be_on_an_internal_address_without_certificates_and_is_off_by_default() -> None:
    server = parse_server(NEEDED + "http_listen: 10.1.2.3:9100\n")
    assert server.http_listen == Address("10.1.2.3", 9100)
    assert StorageConfig(directory="x").http_listen is None
    same = parse("directory: x\nhttp_listen: 10.1.2.3:55280\n")
    assert same.http_listen == Address("10.1.2.3", 55280), "another address of the machine is another port"

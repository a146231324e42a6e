"""The settings of the daemons, declared once: type, bounds, default and meaning stand next to each other.

The reader of YAML and the list of values in force (`waltzd.daemon.config_file`), the sample file and the reference page
(`waltzd.daemon.settings`) are all made from the declaration, so they cannot disagree. Everything here is values.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar

from waltzd import errors
from waltzd.archive.location import directory_of
from waltzd.cluster.documents import LEASE_MS_MAX
from waltzd.cluster.zookeeper_credentials import OFF, TLS_MODES, ZooKeeperCredentials, load_credentials
from waltzd.daemon.settings import Bounds, document, sample, setting, spell_size
from waltzd.errors import BadArgument
from waltzd.format.layout import PARTITIONS_MAX
from waltzd.format.record import OVERHEAD_BYTES
from waltzd.protocol.address import Address, is_name, parse_address
from waltzd.protocol.role import Role

MESSAGE_OVERHEAD_BYTES = 64 << 10
"""What a gRPC message has around its records, at most: columns, session, partition, lengths."""
BATCH_OVERHEAD_BYTES = 2 << 20
"""What a batch has besides its records: nine bytes for each lock of a transaction, of which a server allows a hundred
thousand at most, or lengths and counts of many small transactions."""

_ROOT = re.compile(r"(/[A-Za-z0-9][A-Za-z0-9._-]*)+")
_NUMBERS = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?")
_WILDCARDS = ("0.0.0.0", "::")
"""Addresses to listen on that no client can connect to."""
RECORD_BYTES_MAX = 16 << 20
"""The default of storages: a payload with what stands around it in a record."""

_HTTP_LISTEN = (
    "Address for monitoring: `/metrics` for Prometheus, `/healthz` and `/readyz`. It only reads and holds no secret, and "
    "asks nobody for a certificate: use an internal address. Without it there is no such port."
)
_ARCHIVE_KEY = (
    "Key file of the archive, for this daemon only: `waltzctl archive sign --new-key FILE` makes one, "
    "for all storages and servers of a cluster. Manifests and saved documents are signed with it, and read only where they "
    "are. It never goes into the store."
)
_ARCHIVE_UNSIGNED = (
    "With `archive_key`: whether objects without a signature are read, as in an archive that is older than its key. "
    "`accepted` only until `waltzctl archive sign` has signed them; one with a wrong signature never is."
)


@dataclass(frozen=True, kw_only=True)
class DaemonConfig:
    """The settings that both daemons have. A field without a text is declared by each, in words of its own."""

    role: ClassVar[Role]

    name: str | None
    listen: Address
    admin_listen: Address
    http_listen: Address | None
    archive: str | None
    tls_certificate: str | None = setting(
        "Certificate of this process in PEM, followed by intermediate ones. Together with `tls_key` and `tls_ca` it makes "
        "every connection mutual TLS. A file that is replaced is used from the next connection on.",
        default=None,
        example="/etc/waltz/{role}.pem",
    )
    tls_key: str | None = setting(
        "Private key of the certificate in PEM. Other users of the machine must not be able to read it.",
        default=None,
        example="/etc/waltz/{role}.key",
    )
    tls_ca: str | None = setting(
        "Certificates in PEM of the authorities whose signatures count.", default=None, example="/etc/waltz/ca.pem"
    )
    tls_revoked: str | None = setting(
        "Revocation lists in PEM, one or more. A caller with a certificate that one of them names is refused, and its open "
        "connections end within some seconds. A file that is replaced counts at once.",
        default=None,
        example="/etc/waltz/revoked.pem",
    )
    http_tls: str = setting(
        "Whether `http_listen` speaks TLS, with the daemon's own certificate. Who asks needs none.",
        default="off",
        choices=("off", "on"),
    )
    plaintext: str = setting(
        "Where this daemon may listen without certificates. `loopback`: for this machine only. `anywhere`: every process "
        "that reaches the port may do everything.",
        default="loopback",
        choices=("loopback", "anywhere"),
    )
    log_format: str = setting(
        "How log lines look: `text` for people, `json` for collectors.", default="text", choices=("text", "json")
    )
    log_level: str = setting(
        "The least important lines that are logged.", default="info", choices=("debug", "info", "warning", "error")
    )
    audit_file: str | None = setting(
        "Where it is kept who asked this daemon for what, a line each, and what was refused. Without it, a storage keeps "
        "`audit.log` in its directory; a server keeps it in the directory that the service manager gives it "
        "(`STATE_DIRECTORY`), or in its log only. What servers and applications do every day stands beside it, in a file "
        "whose name has `-traffic` in front of its ending.",
        default=None,
        example="/var/log/waltz/audit.log",
    )
    audit_bytes_max: Annotated[int, Bounds(4 << 10, 1 << 30, "bytes")] = setting(
        "Begin a new audit file when the current one has reached this size.", default=8 << 20
    )
    audit_files_max: Annotated[int, Bounds(1, 1000)] = setting(
        "How many audit files are kept; the oldest is deleted for a new one.", default=8
    )

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """What the types do not show: settings that are wrong, or do not go together, as (key, what is wrong)."""
        if self.name is not None and not is_name(self.name):
            yield "name", f"{self.name!r} is not a name: use letters, digits, dots, dashes and underscores, at most 64"
        if self.archive is not None:
            try:
                directory_of(self.archive)
            except BadArgument as error:
                yield "archive", error.message
        if self.admin_listen == self.listen and self.listen.port != 0:
            yield "admin_listen", f"{self.admin_listen} is also the address of `listen`; the two must differ"
        yield from self._shared("listen", self.listen)
        yield from self._shared("admin_listen", self.admin_listen)
        missing = [name for name in ("tls_certificate", "tls_key", "tls_ca") if getattr(self, name) is None]
        if 0 < len(missing) < 3:
            yield missing[0], "it is missing: tls_certificate, tls_key and tls_ca go together"
        if missing and self.http_tls == "on":
            yield "http_tls", "it needs a certificate: set tls_certificate, tls_key and tls_ca"
        if missing and self.tls_revoked is not None:
            yield "tls_revoked", "without tls_certificate, tls_key and tls_ca nobody shows a certificate"
        if len(missing) < 3 or self.plaintext == "anywhere":
            return
        for name, address in (("listen", self.listen), ("admin_listen", self.admin_listen)):
            if not address.is_loopback:
                yield (
                    name,
                    f"{address} can be reached from other machines, so it needs certificates: set tls_certificate, tls_key "
                    "and tls_ca, or, where nobody else is on the network, plaintext: anywhere",
                )

    def _shared(self, name: str, other: Address) -> Iterator[tuple[str, str]]:
        """Two services cannot share a port, also where one listens at all addresses of the machine."""
        http = self.http_listen
        if http is None or http.port == 0 or http.port != other.port:
            return
        if http.host == other.host or http.host in _WILDCARDS or other.host in _WILDCARDS:
            yield "http_listen", f"{http} is also the address of `{name}`; the two must differ"


def check_files(config: DaemonConfig) -> None:
    """`BadConfig` unless the certificates are there, fit together and name the role of the daemon, and credentials are
    some."""
    from waltzd.wire.tls import tls_for

    tls_for(config, config.role, config.cluster_key if isinstance(config, StorageConfig) else None)
    if isinstance(config, ServerConfig):
        _ = config.access


@dataclass(frozen=True, kw_only=True)
class StorageConfig(DaemonConfig):
    """Settings of one storage daemon."""

    role = Role.STORAGE

    directory: str = setting(
        "Where this storage keeps its files. One process holds it at a time. It is created when it does not exist.",
        example="/var/lib/waltz/storage",
    )
    name: str | None = setting(
        "The name of this storage in its cluster. Its directory remembers the name, and is refused under another one. "
        "Without this setting the name in the certificate counts, or the first by which a server or an operator calls this "
        "storage.",
        default=None,
        example="s1",
    )
    listen: Address = setting(
        "Address for servers: sessions, appends, reads. Port 0 lets the system choose one.",
        default=Address("127.0.0.1", 55280),
    )
    stream_port: Annotated[int, Bounds(0, 65535)] = setting(
        "Port for what servers append and copy, on the host of `listen`. 0 lets the system choose one: servers are told.",
        default=0,
    )
    admin_listen: Address = setting(
        "Address for operators: health, partitions, verification. It must differ from `listen`.",
        default=Address("127.0.0.1", 55281),
    )
    http_listen: Address | None = setting(_HTTP_LISTEN, default=None, example="127.0.0.1:55282")
    cluster_key: uuid.UUID | None = setting(
        "The cluster's UUID. Needed only the first time, when the directory is empty; afterwards it must agree when given.",
        default=None,
        example="00112233-4455-6677-8899-aabbccddeeff",
    )
    partitions: Annotated[int | None, Bounds(1, PARTITIONS_MAX)] = setting(
        "How many partitions the cluster has. Needed only the first time; afterwards it must agree when given.",
        default=None,
        example="16",
    )
    segment_bytes_max: Annotated[int, Bounds(1 << 10, 1 << 40, "bytes")] = setting(
        "Start a new segment of format 0 when the current one is larger than this; the record that crosses it stays whole. "
        "In format 1 the owner of a partition says where a segment ends: `segment_bytes_max` of the server.",
        default=64 << 20,
    )
    record_bytes_max: Annotated[int, Bounds(1 << 10, 1 << 30, "bytes")] = setting(
        "The largest record that is accepted, with its 40 bytes around the payload. Use the same on all storages.",
        default=16 << 20,
    )
    frame_bytes_max: Annotated[int, Bounds(1 << 10, 1 << 30, "bytes")] = setting(
        "How many bytes of records travel in one message. A record larger than this travels in a message of its own.",
        default=4 << 20,
    )
    queue_bytes_max: Annotated[int, Bounds(1 << 10, 16 << 30, "bytes")] = setting(
        "Bytes of appends that may wait, over all partitions, before senders wait; one partition may fill a quarter of it. "
        "One frame of each partition always may wait.",
        default=32 << 20,
    )
    read_chunk_bytes: Annotated[int, Bounds(4 << 10, 1 << 30, "bytes")] = setting(
        "How much is read from a file at once to serve a reader. A larger record is read whole.", default=1 << 20
    )
    free_bytes_min: Annotated[int, Bounds(0, 1 << 50, "bytes")] = setting(
        "Appends are refused while the file system has less free space than this. Reads and administration go on.",
        default=64 << 20,
    )
    reserve_bytes: Annotated[int, Bounds(64 << 10, 1 << 40, "bytes")] = setting(
        "Size of the file that reserves space, so that a start never needs free space on a full disk.", default=1 << 20
    )
    flush_threads: Annotated[int, Bounds(1, 256)] = setting(
        "Threads that write and flush. More of them help when the disk serves several flushes at once.", default=4
    )
    drain_seconds: Annotated[int, Bounds(0, 3600, "seconds")] = setting(
        "How long calls in progress may take to finish after a request to stop.", default=10
    )
    scrub_seconds: Annotated[int, Bounds(0, 366 * 86_400, "seconds")] = setting(
        "Read every sealed segment once in this time, to find what rots on the disk; owners heal what is found. 0 turns it "
        "off.",
        default=7 * 86_400,
    )
    archive: str | None = setting(
        "The store to which sealed segments are uploaded: a directory, or a bucket as in s3://bucket/folder, gs:// or "
        "az://. Use the same on all storages. Credentials of a bucket come from where its own tools take them: the "
        "environment, or the identity of the machine; buckets need `waltzd[archive]`.",
        default=None,
        example="/mnt/archive",
    )
    archive_key: str | None = setting(_ARCHIVE_KEY, default=None, example="/etc/waltz/archive.key")
    archive_unsigned: str = setting(_ARCHIVE_UNSIGNED, default="refused", choices=("refused", "accepted"))

    @property
    def message_bytes_max(self) -> int:
        """Of one message: a record larger than a frame still has to travel, in a batch with its locks."""
        return max(self.frame_bytes_max, self.record_bytes_max) + MESSAGE_OVERHEAD_BYTES + BATCH_OVERHEAD_BYTES

    def conflicts(self) -> Iterator[tuple[str, str]]:
        yield from super().conflicts()
        if self.stream_port != 0 and self.stream_port in (self.listen.port, self.admin_listen.port):
            yield "stream_port", f"{self.stream_port} is also the port of `listen` or `admin_listen`; all three must differ"
        yield from self._shared("stream_port", Address(self.listen.host, self.stream_port))


@dataclass(frozen=True, kw_only=True)
class ServerConfig(DaemonConfig):
    """Settings of one server, the daemon that owns partitions."""

    role = Role.SERVER

    name: str = setting(
        "The name of this server in its cluster, and its identity: a restarted server of the same name goes on where it "
        "stopped. Letters, digits, dots, dashes and underscores, at most 64.",
        example="server-1",
    )
    coordinator: str = setting("Addresses of the ZooKeeper ensemble, separated by commas.", example="127.0.0.1:2181")
    cluster: str = setting("Where the cluster's documents are in ZooKeeper.", default="/waltz")
    coordinator_tls: str = setting(
        "How ZooKeeper is spoken to. `off`: in plain text. `host`: with TLS, and its certificate must carry the host name "
        "or address that `coordinator` gives. `authority`: with TLS, and any certificate of the authority will do; each of "
        "their holders may then pose as ZooKeeper.",
        default=OFF,
        choices=TLS_MODES,
    )
    coordinator_tls_certificate: str | None = setting(
        "Certificate that is shown to ZooKeeper, in PEM. Without it `tls_certificate` and `tls_key` are.",
        default=None,
        example="/etc/waltz/zookeeper-client.pem",
    )
    coordinator_tls_key: str | None = setting(
        "Private key of `coordinator_tls_certificate`.", default=None, example="/etc/waltz/zookeeper-client.key"
    )
    coordinator_tls_ca: str | None = setting(
        "Certificates in PEM of the authorities that sign for ZooKeeper. Without it `tls_ca` counts; the authorities of "
        "the machine never do.",
        default=None,
        example="/etc/waltz/zookeeper-ca.pem",
    )
    coordinator_credentials: str | None = setting(
        "A file with a line `name:password`, which only this daemon may read: the documents of a closed cluster belong to "
        "that name, and ZooKeeper lets nobody else read or change them. Further lines are shown to ZooKeeper as well, "
        "while a password is replaced. A line `read-only name:password` names who may read the documents and change "
        "nothing. Use the same on all servers, and for `waltzctl`.",
        default=None,
        example="/etc/waltz/zookeeper.credentials",
    )
    coordinator_open: str = setting(
        "What a server with certificates does when ZooKeeper lets everybody change the documents of the cluster. "
        "`refused`: it does not start. `accepted`: it logs that and goes on; for a ZooKeeper that nobody else reaches, and "
        "until `waltzctl cluster secure` has closed the documents.",
        default="refused",
        choices=("refused", "accepted"),
    )
    session_seconds: Annotated[int, Bounds(1, 60, "seconds")] = setting(
        "How long ZooKeeper waits for a heartbeat before it declares this server dead and its partitions move. Those of a "
        "process that has ended move earlier, when its port refuses connections and the storages confirm it.",
        default=6,
    )
    listen: Address = setting(
        "Address for applications. Port 0 lets the system choose one.", default=Address("127.0.0.1", 55180)
    )
    admin_listen: Address = setting(
        "Address for operators. It must differ from `listen`.", default=Address("127.0.0.1", 55181)
    )
    http_listen: Address | None = setting(_HTTP_LISTEN, default=None, example="127.0.0.1:55182")
    stream_port: Annotated[int, Bounds(-1, 65535)] = setting(
        "Port for applications that mount without gRPC, as the library for Python does where it gets through, on the host "
        "of `listen`. 0 lets the system choose one: applications are told. -1: none, and everything goes through `listen`.",
        default=0,
    )
    advertise: Address | None = setting(
        "The address that applications are told to connect to, where it is not `listen`.",
        default=None,
        example="server-1.example:55180",
    )
    preferred: str | None = setting(
        "Partitions that this server should own as far as an even distribution permits: numbers and ranges, separated by "
        "commas.",
        default=None,
        example="0,4-7",
    )
    payload_bytes_max: Annotated[int, Bounds(1, RECORD_BYTES_MAX - OVERHEAD_BYTES, "bytes")] = setting(
        "The largest payload of a transaction. With 40 bytes more it must fit into `record_bytes_max` of every storage.",
        default=1 << 20,
    )
    locks_max: Annotated[int, Bounds(1, 100_000)] = setting("The most locks that one transaction may have.", default=1000)
    frame_bytes_max: Annotated[int, Bounds(1 << 10, 64 << 20, "bytes")] = setting(
        "How many bytes of transactions travel in one message. A larger transaction travels in a message of its own.",
        default=4 << 20,
    )
    inflight_bytes_max: Annotated[int, Bounds(1 << 10, 4 << 30, "bytes")] = setting(
        "Bytes of a partition that may be on their way to its replicas before clients wait. At least one transaction and "
        "one frame must fit.",
        default=16 << 20,
    )
    mounts_max: Annotated[int, Bounds(1, 1_000_000)] = setting(
        "How many clients may have a partition mounted or read by id, counted over all partitions of this server. One name "
        "(of a certificate) may hold four for each one that is free, so others find some. A client that does not read what "
        "it asked for holds up to about 2 MiB.",
        default=1024,
    )
    lock_table_size: Annotated[int, Bounds(1, 100_000_000)] = setting(
        "How many locks each partition remembers. A client that lags further behind than these reach is refused and has to "
        "catch up first. A hundred thousand take about 20 MiB.",
        default=50_000,
    )
    tail_bytes_max: Annotated[int, Bounds(1 << 20, 1 << 40, "bytes")] = setting(
        "Memory for the newest transactions, shared evenly by all partitions of the cluster, because one server may have "
        "to take them all: readers that are nearly level are served from it, slower ones from a storage.",
        default=64 << 20,
    )
    segment_bytes_max: Annotated[int, Bounds(1 << 10, 2 << 30, "bytes")] = setting(
        "In format 1, start a new segment of a partition when the current one has reached this size; what was written in "
        "one step stays whole. In format 0 each storage has this setting for itself.",
        default=64 << 20,
    )
    session_bytes_max: Annotated[int, Bounds(1 << 20, 1 << 50, "bytes")] = setting(
        "A session of a partition ends, and a new one begins, after so many bytes: recovery reads about that much at most.",
        default=1 << 30,
    )
    backup_seconds: Annotated[int, Bounds(0, 86_400, "seconds")] = setting(
        "Where storages have an `archive`: how often what is committed and not archived yet is uploaded to it, and how "
        "often the leader looks whether the documents of the cluster have to be. 0: never.",
        default=10,
    )
    storage_seconds: Annotated[int, Bounds(1, 600, "seconds")] = setting(
        "How long a call to a storage may take before the storage counts as silent.", default=5
    )
    read_lease_ms: Annotated[int, Bounds(0, LEASE_MS_MAX, "milliseconds")] = setting(
        "How long confirmed reads need no round to the storages after the last one, or after an acknowledged append. A "
        "server that replaces one which did not end in order waits for up to twice as long before it opens a partition. It "
        "relies on clocks that go on while a machine stands still: leave it 0 where virtual machines are suspended or put "
        "back. 0: every confirmed read waits for a round.",
        default=0,
    )
    catch_up_bytes_per_second: Annotated[int, Bounds(0, 1 << 40, "bytes")] = setting(
        "How much each replica that has to catch up may copy in a second, so that copying does not slow down writing. 0 "
        "sets no bound.",
        default=64 << 20,
    )
    archive: str | None = setting(
        "The store in which storages archive the partitions, as they name it. Readers of transactions that storages have "
        "trimmed get them from there; the right to read objects is enough. Without it such reads are refused. Credentials "
        "of a bucket come from where its own tools take them; buckets need `waltzd[archive]`.",
        default=None,
        example="/mnt/archive",
    )
    archive_key: str | None = setting(_ARCHIVE_KEY, default=None, example="/etc/waltz/archive.key")
    archive_unsigned: str = setting(_ARCHIVE_UNSIGNED, default="refused", choices=("refused", "accepted"))
    archive_cache: str | None = setting(
        "Directory for what was read from the archive and may be asked for again. Its files have no names, and are gone "
        "when the server ends. Without it the directory for temporary files of the system is used.",
        default=None,
        example="/var/cache/waltz",
    )
    archive_cache_bytes: Annotated[int, Bounds(1 << 20, 1 << 50, "bytes")] = setting(
        "How much of the archive is kept there. A segment is brought as a whole, so several of the largest should fit.",
        default=1 << 30,
    )
    drain_seconds: Annotated[int, Bounds(0, 3600, "seconds")] = setting(
        "How long other servers may take to take over the partitions after a request to stop.", default=30
    )

    @property
    def message_bytes_max(self) -> int:
        """The limit of gRPC: a transaction larger than a frame still has to travel, locks included."""
        locks_bytes = 9 * self.locks_max
        return max(self.frame_bytes_max, self.payload_bytes_max + OVERHEAD_BYTES) + locks_bytes + MESSAGE_OVERHEAD_BYTES

    @property
    def access(self) -> ZooKeeperCredentials:
        """How the coordinator is reached, and as whom; `BadConfig` when a file that it takes cannot be used."""
        own = self.coordinator_tls_certificate, self.coordinator_tls_key
        certificate, key = own if own[0] is not None else (self.tls_certificate, self.tls_key)
        return load_credentials(
            self.coordinator_tls,
            certificate=certificate,
            key=key,
            ca=self.coordinator_tls_ca or self.tls_ca,
            credentials=self.coordinator_credentials,
        )

    @property
    def hosts(self) -> str:
        """The coordinator's addresses in the form of its client."""
        return ",".join(part.strip() for part in self.coordinator.split(","))

    def reached_at(self, port: int) -> Address:
        """Where applications connect, given the port that is in use."""
        return self.advertise or Address(self.listen.host, port)

    def admin_reached_at(self, port: int) -> Address:
        host = self.admin_listen.host
        return Address(self.reached_at(0).host if host in _WILDCARDS else host, port)

    @property
    def preferred_partitions(self) -> tuple[int, ...]:
        return partitions_of(self.preferred) if self.preferred is not None else ()

    def conflicts(self) -> Iterator[tuple[str, str]]:
        for part in self.coordinator.split(","):
            try:
                parse_address(part.strip())
            except ValueError as error:
                yield "coordinator", str(error)
        if not _ROOT.fullmatch(self.cluster):
            yield "cluster", f"{self.cluster!r} is not a path; write it as in /waltz or /waltz/production"
        if (self.coordinator_tls_certificate is None) != (self.coordinator_tls_key is None):
            missing = "coordinator_tls_key" if self.coordinator_tls_key is None else "coordinator_tls_certificate"
            yield missing, "it is missing: coordinator_tls_certificate and coordinator_tls_key go together"
        if self.coordinator_tls != OFF and self.coordinator_tls_ca is None and self.tls_ca is None:
            yield "coordinator_tls", "it needs the authorities that sign for ZooKeeper: set coordinator_tls_ca, or tls_ca"
        try:
            _ = self.preferred_partitions
        except ValueError as error:
            yield "preferred", str(error)
        yield from super().conflicts()
        if self.stream_port > 0:
            if self.stream_port in (self.listen.port, self.admin_listen.port):
                yield "stream_port", f"{self.stream_port} is also the port of `listen` or `admin_listen`; all must differ"
            yield from self._shared("stream_port", Address(self.listen.host, self.stream_port))
        if self.advertise is None and self.listen.host in _WILDCARDS:
            yield "advertise", f"nobody can connect to {self.listen.host}; say which address applications are to use"
        if self.advertise is not None and (self.advertise.host in _WILDCARDS or self.advertise.port == 0):
            yield "advertise", f"nobody can connect to {self.advertise}"
        needed = max(self.payload_bytes_max + OVERHEAD_BYTES, self.frame_bytes_max)
        if self.inflight_bytes_max < needed:
            yield (
                "inflight_bytes_max",
                f"{spell_size(self.inflight_bytes_max)} cannot hold one transaction and one frame; raise it to "
                f"{spell_size(needed)}, or lower payload_bytes_max and frame_bytes_max",
            )


def partitions_of(text: str) -> tuple[int, ...]:
    """The numbers of `0,4-7`; ValueError with a sentence for the user."""
    numbers: set[int] = set()
    for part in text.split(","):
        found = _NUMBERS.fullmatch(part.strip())
        if found is None or int(found[2] or found[1]) < int(found[1]):
            raise ValueError(f"{part.strip()!r} is neither a number nor a range; write partitions as in 0,4-7")
        if int(found[2] or found[1]) >= PARTITIONS_MAX:
            raise ValueError(f"{part.strip()!r} is beyond {PARTITIONS_MAX - 1}, the highest number of a partition")
        numbers.update(range(int(found[1]), int(found[2] or found[1]) + 1))
    return tuple(sorted(numbers))


FILES = {
    "configs/storage.yml": lambda: sample(
        StorageConfig, "Settings of a storage daemon: waltzd storage --config storage.yml"
    ),
    "configs/server.yml": lambda: sample(ServerConfig, "Settings of a server: waltzd server --config server.yml"),
    "docs/configuration.md": lambda: "\n".join(
        [
            "# Settings\n\n"
            "This page is made from `waltzd/daemon/config.py` by `./dev generate`; a test fails when it is stale.\n\n"
            "A configuration file is YAML with one `key: value` per line. Sizes are bytes, or carry a unit: `64MiB`\n"
            "counts in 1024s, `64MB` in 1000s. A key that is not known, a value out of bounds and a key given twice are\n"
            "errors that name the file and the line, and the daemon does not start. `waltzd storage --check-config` and\n"
            "`waltzd server --check-config` only check.\n",
            document(StorageConfig, "Storage: configs/storage.yml"),
            document(ServerConfig, "Server: configs/server.yml"),
        ]
    ),
    "docs/errors.md": errors.page,
}
"""The files of this repository that `./dev generate` makes of the declarations."""

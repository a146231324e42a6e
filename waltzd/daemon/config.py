"""The settings of the daemons, declared once with type, bounds, default and meaning.

The YAML reader and the list of effective values (`waltzd.daemon.config_file`), the sample file and the reference page
(`waltzd.daemon.settings`) are all made from the declaration, so they cannot disagree.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar

from waltzd.archive.location import directory_of
from waltzd.cluster.documents import LEASE_MS_MAX
from waltzd.cluster.zookeeper_credentials import OFF, TLS_MODES, ZooKeeperCredentials, load_credentials
from waltzd.daemon.settings import Bounds, document, format_size, sample, setting
from waltzd.errors import BadArgument, operations
from waltzd.format.batch import GROUPS_BYTES_MAX
from waltzd.format.layout import PARTITIONS_MAX
from waltzd.format.record import OVERHEAD_BYTES
from waltzd.protocol.address import Address, is_name, parse_address
from waltzd.protocol.role import Role

MESSAGE_OVERHEAD_BYTES = 64 << 10
"""Largest overhead of a gRPC message around its records: columns, session, partition, lengths."""
BATCH_OVERHEAD_BYTES = 2 << 20
"""Largest overhead of a batch besides its records: nine bytes for each of 100,000 locks, or the counts of many records."""

_ROOT = re.compile(r"(/[A-Za-z0-9][A-Za-z0-9._-]*)+")
_NUMBERS = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?")
_WILDCARDS = ("0.0.0.0", "::")
"""Addresses that a process can listen on and no client can connect to."""
RECORD_BYTES_MAX = 16 << 20
"""Default of the storages' largest record: a payload and 40 bytes around it."""

_HTTP_LISTEN = (
    "Address for monitoring: `/metrics` for Prometheus, `/healthz` and `/readyz`. The port is read-only, has no secrets "
    "and requires no certificate: use an internal address. Without this setting there is no such port."
)
_ARCHIVE_KEY = (
    "Key file of the archive, for this daemon only: `waltzctl archive sign --new-key FILE` makes one, "
    "for all storages and servers of a cluster. Manifests and saved documents are signed with it, and unsigned ones are "
    "refused. It is never written to the store."
)
_ARCHIVE_UNSIGNED = (
    "With `archive_key`: whether objects without a signature are read, as in an archive that is older than its key. Use "
    "`accepted` only until `waltzctl archive sign` has signed them. An object with a wrong signature is always refused."
)


@dataclass(frozen=True, kw_only=True)
class DaemonConfig:
    """The settings that both daemons have. A field without a text is declared by each class with its own text."""

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
        "Whether `http_listen` uses TLS, with the certificate of the daemon. Callers need no certificate.",
        default="off",
        choices=("off", "on"),
    )
    otlp_endpoint: str | None = setting(
        "Collector of OpenTelemetry that gets the metrics of this daemon every 15 seconds, over OTLP with HTTP. Needs "
        "`waltzd[otlp]`. Headers and certificates for the collector are taken from the environment "
        "(`OTEL_EXPORTER_OTLP_HEADERS`, `OTEL_EXPORTER_OTLP_CERTIFICATE`).",
        default=None,
        example="http://127.0.0.1:4318",
    )
    plaintext: str = setting(
        "Addresses on which this daemon may listen without certificates. `loopback`: this machine only. `anywhere`: "
        "all; every process that reaches the port then has all rights.",
        default="loopback",
        choices=("loopback", "anywhere"),
    )
    log_format: str = setting(
        "Format of log lines: `text` for people, `json` for log collectors.", default="text", choices=("text", "json")
    )
    log_level: str = setting(
        "Lowest level of the lines that are logged.", default="info", choices=("debug", "info", "warning", "error")
    )
    audit_file: str | None = setting(
        "File of the audit log: one line for each call, with the caller and the result. By default a storage writes "
        "`audit.log` in its directory; a server writes it in the directory of its service manager (`STATE_DIRECTORY`), "
        "or only to its log. The daily calls of servers and applications are in a second file, with `-traffic` before "
        "the ending.",
        default=None,
        example="/var/log/waltz/audit.log",
    )
    audit_bytes_max: Annotated[int, Bounds(4 << 10, 1 << 30, "bytes")] = setting(
        "Begin a new audit file when the current one has reached this size.", default=8 << 20
    )
    audit_files_max: Annotated[int, Bounds(1, 1000)] = setting(
        "Number of audit files that are kept; the oldest is deleted for a new one.", default=8
    )

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Yield errors that types and bounds do not detect, as (key, error): invalid or contradictory settings."""
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
        if self.otlp_endpoint is not None and not self.otlp_endpoint.startswith(("http://", "https://")):
            yield "otlp_endpoint", f"{self.otlp_endpoint} is not an address of HTTP: write it as http://127.0.0.1:4318"
        if missing and self.http_tls == "on":
            yield "http_tls", "it needs a certificate: set tls_certificate, tls_key and tls_ca"
        if missing and self.tls_revoked is not None:
            yield "tls_revoked", "without tls_certificate, tls_key and tls_ca no caller has a certificate"
        if len(missing) < 3 or self.plaintext == "anywhere":
            return
        for name, address in (("listen", self.listen), ("admin_listen", self.admin_listen)):
            if not address.is_loopback:
                yield (
                    name,
                    f"{address} can be reached from other machines, so it needs certificates: set tls_certificate, tls_key "
                    "and tls_ca, or, where no other machine is on the network, plaintext: anywhere",
                )

    def _shared(self, name: str, other: Address) -> Iterator[tuple[str, str]]:
        """Yield an error if `http_listen` has the port of another service, on the same or on all addresses."""
        http = self.http_listen
        if http is None or http.port == 0 or http.port != other.port:
            return
        if http.host == other.host or http.host in _WILDCARDS or other.host in _WILDCARDS:
            yield "http_listen", f"{http} is also the address of `{name}`; the two must differ"


def check_files(config: DaemonConfig) -> None:
    """Raise `BadConfig` if the certificates or the credentials for ZooKeeper cannot be used by this daemon."""
    from waltzd.wire.tls import tls_for

    tls_for(config, config.role, config.cluster_key if isinstance(config, StorageConfig) else None)
    if isinstance(config, ServerConfig):
        _ = config.access


@dataclass(frozen=True, kw_only=True)
class StorageConfig(DaemonConfig):
    """Settings of one storage daemon."""

    role = Role.STORAGE

    directory: str = setting(
        "Directory for the files of this storage. Only one process can use it at a time. It is created if it does not "
        "exist.",
        example="/var/lib/waltz/storage",
    )
    name: str | None = setting(
        "Name of this storage in its cluster. The name is stored in the directory, which is refused under another name. By "
        "default it is the name in the certificate, or the first name by which a server or an operator calls this storage.",
        default=None,
        example="s1",
    )
    listen: Address = setting(
        "Address for servers: sessions, appends, reads. Port 0 lets the system choose one.",
        default=Address("127.0.0.1", 55280),
    )
    stream_port: Annotated[int, Bounds(0, 65535)] = setting(
        "Port for append and copy streams of servers, on the host of `listen`. With 0 the system chooses one, which "
        "servers look up.",
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
        "Number of partitions of the cluster. Needed only the first time; afterwards it must agree when given.",
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
        "Largest number of bytes of records in one message; owners may always send 8MiB. A larger record is sent alone.",
        default=4 << 20,
    )
    queue_bytes_max: Annotated[int, Bounds(1 << 10, 16 << 30, "bytes")] = setting(
        "Bytes of appends that may wait, over all partitions, before senders wait; one partition may fill a quarter of it. "
        "One frame of each partition may always wait.",
        default=32 << 20,
    )
    read_chunk_bytes: Annotated[int, Bounds(4 << 10, 1 << 30, "bytes")] = setting(
        "Bytes that are read from a file at once to serve a reader. A larger record is read whole.", default=1 << 20
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
        "Time that calls in progress get to finish after a request to stop.", default=10
    )
    scrub_seconds: Annotated[int, Bounds(0, 366 * 86_400, "seconds")] = setting(
        "Read every sealed segment once in this time, to find damage on the disk, which owners then repair. 0 turns it "
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
        """Largest message: a record larger than a frame is still sent, in a batch with its locks; so is a group."""
        most = max(self.frame_bytes_max, self.record_bytes_max, GROUPS_BYTES_MAX)
        return most + MESSAGE_OVERHEAD_BYTES + BATCH_OVERHEAD_BYTES

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
        "Name and identity of this server in its cluster: a restarted server of the same name continues in its place. "
        "Letters, digits, dots, dashes and underscores, at most 64.",
        example="server-1",
    )
    coordinator: str = setting("Addresses of the ZooKeeper ensemble, separated by commas.", example="127.0.0.1:2181")
    cluster: str = setting("Path of the cluster's documents in ZooKeeper.", default="/waltz")
    coordinator_tls: str = setting(
        "TLS to ZooKeeper. `off`: plain text. `host`: TLS; the certificate must name the host or address in "
        "`coordinator`. `authority`: TLS; any certificate of the authority is accepted, so each of their holders can "
        "impersonate ZooKeeper.",
        default=OFF,
        choices=TLS_MODES,
    )
    coordinator_tls_certificate: str | None = setting(
        "Certificate for ZooKeeper in PEM. By default `tls_certificate` and `tls_key` are used.",
        default=None,
        example="/etc/waltz/zookeeper-client.pem",
    )
    coordinator_tls_key: str | None = setting(
        "Private key of `coordinator_tls_certificate`.", default=None, example="/etc/waltz/zookeeper-client.key"
    )
    coordinator_tls_ca: str | None = setting(
        "Certificates in PEM of the authorities that sign for ZooKeeper. By default `tls_ca` is used; the authorities "
        "of the machine are never trusted.",
        default=None,
        example="/etc/waltz/zookeeper-ca.pem",
    )
    coordinator_credentials: str | None = setting(
        "File with a line `name:password`, which only this daemon may read. The documents of a closed cluster belong to "
        "that name, and ZooKeeper denies other processes any access. Further lines are sent to ZooKeeper as well, to "
        "replace a password. A line `read-only name:password` is a name that may only read the documents. Use the same "
        "file on all servers and for `waltzctl`.",
        default=None,
        example="/etc/waltz/zookeeper.credentials",
    )
    coordinator_open: str = setting(
        "Behaviour of a server with certificates if ZooKeeper permits every process to change the documents of the "
        "cluster. `refused`: the server does not start. `accepted`: it logs a warning and starts; for a ZooKeeper that "
        "no other process can reach, and until `waltzctl cluster set --secure` has closed the documents.",
        default="refused",
        choices=("refused", "accepted"),
    )
    session_seconds: Annotated[int, Bounds(1, 60, "seconds")] = setting(
        "Session time-out of ZooKeeper: without a heartbeat for this time, the server counts as dead and its partitions "
        "move. Those of a process that has ended move earlier, when its port refuses connections and the storages "
        "confirm it.",
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
        "Port for applications that mount over plain frames in place of gRPC, as the Python library does if it can, on "
        "the host of `listen`. With 0 the system chooses one, which applications look up. -1: no such port, only "
        "`listen`.",
        default=0,
    )
    advertise: Address | None = setting(
        "Address that applications connect to, if it is not `listen`.",
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
        "Largest number of bytes of transactions in one message. A larger transaction is sent in a message of its own.",
        default=4 << 20,
    )
    inflight_bytes_max: Annotated[int, Bounds(1 << 10, 4 << 30, "bytes")] = setting(
        "Bytes of a partition that may be in flight to its replicas before clients wait. At least one transaction and one "
        "frame must fit.",
        default=16 << 20,
    )
    mounts_max: Annotated[int, Bounds(1, 1_000_000)] = setting(
        "Largest number of mounts and reads by id, over all partitions of this server. One name (of a certificate) may "
        "have at most four times the number that is free, so that some are left for other names. A client that does not "
        "read its stream holds up to about 2 MiB.",
        default=1024,
    )
    lock_table_size: Annotated[int, Bounds(1, 100_000_000)] = setting(
        "Number of locks in the lock table of each partition. A transaction of a client that lags behind the oldest of "
        "them is rejected until the client has caught up. 100,000 locks take about 20 MiB.",
        default=50_000,
    )
    tail_bytes_max: Annotated[int, Bounds(1 << 20, 1 << 40, "bytes")] = setting(
        "Memory for the newest transactions, divided evenly among all partitions of the cluster, because one server may "
        "have to own them all. Readers that are nearly level are served from memory, slower ones from a storage.",
        default=64 << 20,
    )
    segment_bytes_max: Annotated[int, Bounds(1 << 10, 2 << 30, "bytes")] = setting(
        "In format 1, start a new segment of a partition when the current one has reached this size; a batch is never "
        "split. In format 0 each storage has its own setting.",
        default=64 << 20,
    )
    session_bytes_max: Annotated[int, Bounds(1 << 20, 1 << 50, "bytes")] = setting(
        "Bytes after which a new session of a partition begins. Recovery reads about this amount at most.",
        default=1 << 30,
    )
    backup_seconds: Annotated[int, Bounds(0, 86_400, "seconds")] = setting(
        "With an `archive` on the storages: interval at which committed transactions that are not archived yet are "
        "uploaded, and the leader checks whether the documents of the cluster have to be. 0: never.",
        default=10,
    )
    storage_seconds: Annotated[int, Bounds(1, 600, "seconds")] = setting("Time-out of a call to a storage.", default=5)
    read_lease_ms: Annotated[int, Bounds(0, LEASE_MS_MAX, "milliseconds")] = setting(
        "Read lease: time after a round to the storages, or an acknowledged append, in which confirmed reads need no "
        "round. A server that replaces one which did not end in order waits for up to twice this time before it opens a "
        "partition. The lease relies on clocks that run while a machine is suspended: use 0 for virtual machines that "
        "are suspended or restored. 0: every confirmed read waits for a round.",
        default=0,
    )
    catch_up_bytes_per_second: Annotated[int, Bounds(0, 1 << 40, "bytes")] = setting(
        "Rate limit for each replica that catches up, so that copying does not slow down appends. 0: no limit.",
        default=64 << 20,
    )
    archive: str | None = setting(
        "The store to which storages archive the partitions, with the same address. Transactions that storages have "
        "trimmed are read from it; the right to read objects is enough. Without this setting such reads are refused. "
        "Credentials of a bucket are taken from where its own tools take them; buckets need `waltzd[archive]`.",
        default=None,
        example="/mnt/archive",
    )
    archive_key: str | None = setting(_ARCHIVE_KEY, default=None, example="/etc/waltz/archive.key")
    archive_unsigned: str = setting(_ARCHIVE_UNSIGNED, default="refused", choices=("refused", "accepted"))
    archive_cache: str | None = setting(
        "Directory for the cache of archived segments. Its files are unlinked, so they disappear when the server ends. By "
        "default the system's directory for temporary files is used.",
        default=None,
        example="/var/cache/waltz",
    )
    archive_cache_bytes: Annotated[int, Bounds(1 << 20, 1 << 50, "bytes")] = setting(
        "Size of the cache of archived segments. Segments are fetched as a whole, so several of the largest should fit.",
        default=1 << 30,
    )
    drain_seconds: Annotated[int, Bounds(0, 3600, "seconds")] = setting(
        "Time that other servers get to take over the partitions after a request to stop.", default=30
    )

    @property
    def message_bytes_max(self) -> int:
        """Largest gRPC message: a transaction larger than a frame is still sent, with its locks."""
        locks_bytes = 9 * self.locks_max
        return max(self.frame_bytes_max, self.payload_bytes_max + OVERHEAD_BYTES) + locks_bytes + MESSAGE_OVERHEAD_BYTES

    @property
    def access(self) -> ZooKeeperCredentials:
        """TLS and credentials for ZooKeeper; raises `BadConfig` if one of the files cannot be used."""
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
        """Addresses of ZooKeeper in the form of its client library."""
        return ",".join(part.strip() for part in self.coordinator.split(","))

    def reached_at(self, port: int) -> Address:
        """Return the address that applications connect to, given the port that is in use."""
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
            yield "advertise", f"no client can connect to {self.listen.host}; set the address that applications connect to"
        if self.advertise is not None and (self.advertise.host in _WILDCARDS or self.advertise.port == 0):
            yield "advertise", f"no client can connect to {self.advertise}"
        needed = max(self.payload_bytes_max + OVERHEAD_BYTES, self.frame_bytes_max)
        if self.inflight_bytes_max < needed:
            yield (
                "inflight_bytes_max",
                f"{format_size(self.inflight_bytes_max)} cannot hold one transaction and one frame; raise it to "
                f"{format_size(needed)}, or lower payload_bytes_max and frame_bytes_max",
            )


def partitions_of(text: str) -> tuple[int, ...]:
    """Parse partitions as in `0,4-7`; raise ValueError with a sentence for the user."""
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
    "docs/errors.md": operations.page,
}
"""Files of this repository that `./dev generate` makes from the declarations, with their generators."""

"""The audit log of a running daemon: two chained files (`waltzd.protocol.audit`), and lines in the log of the daemon.

One file has the calls of people, and all calls that were denied; the other has the daily calls of servers and applications,
so that they do not displace lines about people. A thread writes and flushes both, so a disk that hangs delays no caller. A
record is therefore on disk a moment after its call, and a machine that crashes loses the newest ones. A full disk does not
stop the daemon either: records wait in memory, up to a limit; dropped records are counted, and a record says so as soon as
there is space. Without files, records are only in the log of the daemon.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import threading
import time
from collections import deque
from contextlib import suppress
from importlib.metadata import version

from waltzd.daemon.config import DaemonConfig
from waltzd.disk.real import translate
from waltzd.errors import WaltzError
from waltzd.errors.operations import BadConfig, tree
from waltzd.protocol.audit import BEGAN, ENDED, LOST, NOBODY, START, AuditRecord, RefusalCounter, encode, hash_of
from waltzd.protocol.role import Role

AUDIT_NAME = "audit.log"
"""Name of the file with the calls of people, and all calls that were denied."""
TRAFFIC_NAME = "audit-traffic.log"
"""Name of the file with the daily calls of servers and applications."""
WAITING_MAX = 10_000
"""Records that wait for the disk at most: about ten megabytes."""
END_BYTES = 1 << 20
"""Bytes that are read from the end of a file when it is opened."""
TORN_BYTES_MAX = 64 << 10
"""Longest incomplete line that is cut off. Longer text without a line end is not a record, and is kept."""
LOOK_SECONDS = 2.0
FLUSH_SECONDS = 1.0
_MISCONFIGURED = frozenset(
    {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.EROFS, errno.EAGAIN, errno.ELOOP}
)
_DENIED = frozenset(code for code, kind in tree().items() if kind.status == "PERMISSION_DENIED")
_PEOPLE = ("StorageAdmin/", "ServerAdmin/", "audit/")
_OPERATOR = f"/role/{Role.OPERATOR}/"
log = logging.getLogger("waltz.audit")
TimedRecord = tuple[AuditRecord, int]
"""Record and its time in milliseconds since 1970."""


class ChainedFile:
    """A rotated file of chained lines: PATH has the newest, PATH.1, PATH.2 and so on have older ones. Not thread-safe."""

    def __init__(self, path: str, *, bytes_max: int, files_max: int) -> None:
        self.path = path
        self.head = START
        """Hash of the newest line."""
        self._bytes_max = bytes_max
        self._files_max = files_max
        self._file: int | None = None
        self._size = 0

    def open(self) -> None:
        """Open the file to append to it. Cut off an incomplete last line, which a crash may leave."""
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # two writers would fork the chain
            content = self._whole_lines(file)
            if not content:
                with suppress(FileNotFoundError), open(f"{self.path}.1", "rb") as older:
                    older.seek(max(0, os.fstat(older.fileno()).st_size - END_BYTES))
                    content = older.read()
        except BaseException:
            os.close(file)
            raise
        self.head = hash_of(content.removesuffix(b"\n").rpartition(b"\n")[2]) if content else START
        self._file = file

    def _whole_lines(self, file: int) -> bytes:
        self._size = os.fstat(file).st_size
        content = os.pread(file, END_BYTES, max(0, self._size - END_BYTES))
        torn = len(content) - (content.rfind(b"\n") + 1)
        if torn > TORN_BYTES_MAX:
            self._size += os.write(file, b"\n")
        elif torn:
            self._size -= torn
            os.ftruncate(file, self._size)
            log.warning("the last line of %s was not whole, and was cut off: %d bytes", self.path, torn)
            content = content[: len(content) - torn]
        return content

    def append(self, lines: list[TimedRecord]) -> None:
        """Write and flush all of the lines, or raise OSError and leave none of them."""
        if self._file is None:
            self.open()
        if self._size >= self._bytes_max:
            self._rotate()
        assert self._file is not None
        texts, head = [], self.head
        for deed, time_ms in lines:
            text = encode(deed, time_ms=time_ms, before=head).encode()
            texts.append(text + b"\n")
            head = hash_of(text)
        content = memoryview(b"".join(texts))
        try:
            written = 0
            while written < len(content):
                written += os.write(self._file, content[written:])
            os.fdatasync(self._file)
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._file, self._size)
            self.close()
            raise
        self.head, self._size = head, self._size + len(content)

    def _rotate(self) -> None:
        self.close()
        for number in range(self._files_max - 2, 0, -1):
            with suppress(FileNotFoundError):
                os.replace(f"{self.path}.{number}", f"{self.path}.{number + 1}")
        if self._files_max > 1:
            os.replace(self.path, f"{self.path}.1")
        else:
            os.unlink(self.path)
        head = self.head  # with one file only, the previous line is gone
        self.open()
        self.head = head

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


class AuditLog:
    """The audit log of a process, with two files or none. Any thread may add records."""

    def __init__(self, file: ChainedFile | None, traffic: ChainedFile | None = None) -> None:
        """`traffic` is the file for servers and applications; None to use `file` for all records. Raise `BadConfig` if a
        file cannot be written, for another reason than a full disk."""
        self._file = file
        self._traffic = traffic or file
        self._changed = threading.Condition()
        self._refusals = RefusalCounter()
        files = [one for one in dict.fromkeys((file, traffic)) if one is not None]
        self._waiting: dict[ChainedFile, deque[TimedRecord]] = {one: deque() for one in files}
        self._lost = dict.fromkeys(files, 0)
        self._complaint: dict[ChainedFile, WaltzError] = {}
        for one in files:
            try:
                one.open()
            except OSError as error:
                if error.errno in _MISCONFIGURED:
                    raise BadConfig(f"the audit log cannot be written: {translate(error, one.path).message}") from error
                self._complain(error, one)
        threading.Thread(target=self._write, name="audit", daemon=True).start()
        self.note(AuditRecord(who=NOBODY, peer="", what=BEGAN, about=f"version={version('waltzd')} process={os.getpid()}"))
        log.info("the audit log begins; %s", self._place())

    def _place(self) -> str:
        return "it has no file" if self._file is None else f"the head of {self._file.path} is {self._file.head}"

    def note(self, deed: AuditRecord) -> None:
        with self._changed:
            for one in self._refusals.record(deed, _steady_ms()) if deed.code is not None else (deed,):
                self._put(one, _now_ms())

    def _put(self, deed: AuditRecord, now_ms: int) -> None:
        is_of_people = deed.what.startswith(_PEOPLE) or _OPERATOR in deed.who or _is_denied(deed)
        file = self._file if is_of_people else self._traffic
        if file is not None:
            if len(self._waiting[file]) < WAITING_MAX:
                self._waiting[file].append((deed, now_ms))
            else:
                self._lost[file] += 1
            self._changed.notify_all()
        if deed.what not in (BEGAN, ENDED, LOST):
            log.log(_level(deed), "%s", sentence(deed), extra={"code": deed.code})

    def _count_refusals(self, *, is_end: bool = False) -> None:
        for one in self._refusals.expired(_steady_ms(), is_end=is_end):
            self._put(one, _now_ms())

    def close(self) -> None:
        """Record the end of the process, and wait at most `FLUSH_SECONDS` for the disk."""
        with self._changed:
            self._count_refusals(is_end=True)
        self.note(AuditRecord(who=NOBODY, peer="", what=ENDED))
        self.flush()
        log.info("the audit log ends; %s", self._place())

    def flush(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not any(self._waiting.values()), FLUSH_SECONDS)

    # -- the thread

    def _write(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: any(self._waiting.values()), LOOK_SECONDS)
                self._count_refusals()
                batches = {file: list(waiting) for file, waiting in self._waiting.items() if waiting}
            written = [self._append(file, batch) for file, batch in batches.items()]
            if not all(written):
                time.sleep(LOOK_SECONDS)

    def _append(self, file: ChainedFile, batch: list[TimedRecord]) -> bool:
        try:
            file.append(batch)
        except OSError as error:
            self._complain(error, file)
            return False
        with self._changed:
            for _ in batch:
                self._waiting[file].popleft()
            lost, self._lost[file] = self._lost[file], 0
            if lost:
                self._put(
                    AuditRecord(who=NOBODY, peer="", what=LOST, about="they could not be written", times=lost), _now_ms()
                )
            self._changed.notify_all()
        if self._complaint.pop(file, None) is not None:
            log.warning("the audit log %s is written again; %d lines of it were lost", file.path, lost)
        return True

    def _complain(self, error: OSError, file: ChainedFile) -> None:
        """Log an error of a file once, until it can be written again."""
        found = translate(error, f"writing {file.path}")
        if file not in self._complaint:
            log.error("%s the audit log cannot be written: %s. This daemon goes on; the newest %d lines wait in memory",
                      found.code, found.message, WAITING_MAX)  # fmt: skip
        self._complaint[file] = found


def sentence(line: AuditRecord) -> str:
    parts = [line.what, line.partitions and f"partition {line.partitions}", line.about]
    did = " ".join(part for part in parts if part)
    times = f", {line.times} times more" if line.times > 1 else ""
    return f"{line.who} at {line.peer}: {did}: {'done' if line.code is None else f'refused with {line.code}'}{times}"


def _is_denied(line: AuditRecord) -> bool:
    """Return whether the caller lacked the right. Other refusals are routine: another owner, a newer session."""
    return line.code in _DENIED


def _level(line: AuditRecord) -> int:
    if _is_denied(line):
        return logging.WARNING
    return logging.INFO if line.what.startswith(_PEOPLE) else logging.DEBUG


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _steady_ms() -> int:
    """Return milliseconds of the clock by which refusals are counted: the time of day may jump back by hours, and none
    would be written for that long."""
    return time.monotonic_ns() // 1_000_000


def audit_log(config: DaemonConfig, directory: str | None) -> AuditLog:
    """Return the audit log of a daemon. `directory` is for its files, unless the configuration sets another; None for no
    files."""
    path = config.audit_file or (None if directory is None else os.path.join(directory, AUDIT_NAME))
    bounds = {"bytes_max": config.audit_bytes_max, "files_max": config.audit_files_max}
    if path is None:
        return AuditLog(None)
    return AuditLog(ChainedFile(path, **bounds), ChainedFile(_traffic_beside(path), **bounds))


def _traffic_beside(path: str) -> str:
    """Return the path of the second file: `audit-traffic.log` beside `audit.log`."""
    root, extension = os.path.splitext(path)
    return f"{root}-traffic{extension}"

"""An archive that is made in memory and put down whole: the same content gives the same bytes, but for what changes.

Names in it are chosen by us, never taken from a path outside; times, owners and modes are the same for all.
"""

from __future__ import annotations

import errno
import gzip
import io
import json
import os
import re
import tarfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from waltzctl.show.forms import JSON_VERSION
from waltzd.disk.real import translate
from waltzd.errors import AlreadyThere

FOLDER = "waltz-support"
_WORDS = "password|passwd|secret|token|credential|private|tls_key"
_SECRET = re.compile(rf"^(\s*[A-Za-z0-9_]*(?:{_WORDS})[A-Za-z0-9_]*\s*:).*$", re.IGNORECASE | re.MULTILINE)
_WITH_PASSWORD = re.compile(r"(://[^/\s:@]*:)[^/\s@]+@")
STRIPPED = "'(taken out)'"
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS})
"""How file systems without hard links refuse one: those of memory sticks, and some on networks."""


def strip_secrets(text: str) -> str:
    """A configuration file as it may be shown to others: names of settings stay."""
    return _WITH_PASSWORD.sub(r"\1***@", _SECRET.sub(rf"\1 {STRIPPED}", text))


@dataclass
class Bundle:
    files: dict[str, bytes] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    """What could not be collected, and why."""

    def put(self, name: str, content: bytes) -> None:
        assert name not in self.files, name
        self.files[name] = content

    def put_json(self, name: str, value: Mapping[str, Any]) -> None:
        self.put(name, (json.dumps({"version": JSON_VERSION, **value}, indent=1, sort_keys=True) + "\n").encode())

    def archive(self) -> bytes:
        packed = io.BytesIO()
        with (
            gzip.GzipFile(fileobj=packed, mode="wb", mtime=0, filename="") as zipped,
            tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as tar,
        ):
            for name, content in sorted(self.files.items()):
                entry = tarfile.TarInfo(f"{FOLDER}/{name}")
                entry.size, entry.mode = len(content), 0o600
                tar.addfile(entry, io.BytesIO(content))
        return packed.getvalue()

    def write(self, path: Path) -> int:
        """Whole or not at all, and never over another file. The size."""
        content = self.archive()
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            try:
                with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
                _put_in_place(beside, path)
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(beside)
        except FileExistsError as error:
            raise AlreadyThere(f"{path} is there already") from error
        except OSError as error:
            raise translate(error, f"writing {path}") from error
        return len(content)


def _put_in_place(beside: Path, path: Path) -> None:
    """`FileExistsError` when there is one: a link refuses then, where a rename would not."""
    try:
        os.link(beside, path)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))  # the name is ours from here on
        os.replace(beside, path)

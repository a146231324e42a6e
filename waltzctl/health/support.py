"""`waltzctl support bundle`: diagnostics of a cluster in one archive, without payloads and without secrets.

Records of the log are never read: only the reports of daemons, and the documents in ZooKeeper. The archive names what
could not be collected, because that is often the fault. It is built in memory. Equal content
gives equal bytes: entries are sorted, and have equal times, owners and modes.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import tarfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from platform import python_version
from typing import Annotated, Any

import typer
from typer import Option

from waltzctl.health.doctor import examined
from waltzctl.health.events import event_lines, history_of, listen, newest_lines
from waltzctl.health.poll import Poll
from waltzctl.health.rules import diagnose
from waltzctl.shell.blueprint import write_new
from waltzctl.shell.cluster_target import ClusterTarget, CommandTarget
from waltzctl.shell.options import Output, Timeout
from waltzctl.show.cluster import checks, status
from waltzctl.show.forms import JSON_VERSION, plain, put_json
from waltzctl.snapshot.cluster_snapshot import ClusterSnapshot
from waltzd.client import loop
from waltzd.cluster.cluster import CLIENT_IDS
from waltzd.cluster.coordinator import Coordinator
from waltzd.errors import EXIT_OK, EXIT_PARTIAL, WaltzError

CALL_SECONDS = 5.0
FOLDER = "waltz-support"
_WORDS = "password|passwd|secret|token|credential|private|tls_key"
_SECRET = re.compile(rf"^(\s*[A-Za-z0-9_]*(?:{_WORDS})[A-Za-z0-9_]*\s*:).*$", re.IGNORECASE | re.MULTILINE)
_WITH_PASSWORD = re.compile(r"(://[^/\s:@]*:)[^/\s@]+@")
STRIPPED = "'(taken out)'"
_SECRET_DOCUMENT = re.compile(rb'("secret":\s*)"[^"]*"')


def bundle(
    *,
    to: Annotated[
        Path | None,
        Option(
            "--to",
            dir_okay=False,
            metavar="FILE.tar.gz",
            help="File to write. Default: waltz-support-CLUSTER-TIME.tar.gz in the current directory.",
        ),
    ] = None,
    seconds: Timeout = CALL_SECONDS,
    target: CommandTarget,
    output: Output = "table",
) -> int:
    """Collect diagnostics in one archive: status, checks of `waltzctl doctor`, the documents in ZooKeeper, the description
    and the newest log lines of each daemon, the history of changes, versions, and the configuration of a cluster on this
    machine.

    The archive has no payloads. Values of settings that may be secret, and paths of keys, are removed. An existing
    file is never replaced. Exit code 7 if something could not be collected.

    \b
    Examples:
      waltzctl support bundle
      waltzctl support bundle --to /tmp/bundle.tar.gz
    """
    found, name, at = loop.run(_collect(target, seconds))
    stamp = "".join(letter for letter in at if letter.isalnum())
    path = to or Path(f"waltz-support-{name}-{stamp}.tar.gz")
    packed = found.packed()
    write_new(path, packed)
    if output == "json":
        found_events = {"bytes": len(packed), "files": sorted(found.files), "missing": dict(sorted(found.missing.items()))}
        put_json({"file": str(path.absolute()), **found_events})
        return EXIT_PARTIAL if found.missing else EXIT_OK
    typer.echo(str(path))
    typer.echo(f"{len(found.files)} files, {len(packed):,} bytes; no payloads, no secrets", err=True)
    for what, why in sorted(found.missing.items()):
        typer.echo(f"missing: {what}: {why}", err=True)
    return EXIT_PARTIAL if found.missing else EXIT_OK


async def _collect(target: ClusterTarget, seconds: float) -> tuple[Bundle, str, str]:
    """Return the bundle, the name of the cluster, and the time at which its status was read."""
    found = Bundle()
    async with Poll(target, seconds=seconds, aloud=True) as poll:
        report = await poll.report()
        snapshot = report.snapshot
        found.put_json("status.json", status(report).document)
        found.put_json("doctor.json", checks(diagnose(await examined(target, report, seconds=seconds))).document)
        for name, error in snapshot.silent.items():
            found.missing[f"daemons/{name}.json"] = f"{error.code} {error.message}"
        for name, described in describe(snapshot).items():
            found.put_json(f"daemons/{name}.json", described)
        history = []
        if report.lost is None:
            try:
                cluster = await poll.cluster()
                for path, document in (await metadata_tree(cluster.coordinator)).items():
                    found.put(f"metadata{path}", document)
                history = await history_of(cluster)
            except WaltzError as error:
                found.missing["metadata"] = f"{error.code} {error.message}"
        else:
            found.missing["metadata"] = f"{report.lost.cause.code} {report.lost.cause.message}"
        found.put_json("history.json", {"history": [plain(entry) for entry in history]})
        found_events, silent = await listen(snapshot, target.tls, seconds=seconds)
        lines = event_lines(found_events, history, since_ms=0, level="debug")
        found.put_json("events.json", newest_lines(lines).document)
        for name, refusal in silent.items():
            found.missing[f"events of {name}"] = f"{refusal.code} {refusal.message}"
        versions = {view.meta.name: None if view.reported is None else view.reported.version for view in snapshot.nodes}
        tool = {"waltzctl": version("waltzd"), "python": python_version()}
        found.put_json("versions.json", {**tool, "daemons": versions, "collected": report.at, "epoch": int(time.time())})
    if target.directory is not None:
        for file in sorted(target.directory.glob("*/*.yml")):
            try:
                found.put(f"config/{file.parent.name}.yml", strip_secrets(file.read_text(encoding="utf-8")).encode())
            except (OSError, UnicodeDecodeError) as trouble:
                found.missing[f"config/{file.parent.name}.yml"] = str(trouble)
    found.put_json("missing.json", {"missing": found.missing})
    return found, snapshot.meta.name, report.at


def describe(found: ClusterSnapshot) -> dict[str, Any]:
    """Return the description that each answering daemon reported, by its name. A storage that has the name of a server is
    `NAME-storage`."""
    servers = {name: plain(reported) for name, reported in found.server_reports.items()}
    storages = found.storage_reports.items()
    return servers | {f"{name}-storage" if name in servers else name: plain(reported) for name, reported in storages}


async def metadata_tree(coordinator: Coordinator) -> dict[str, bytes]:
    """Return all documents by their path in the archive, like `/servers/one.json`. The secret of client ids is removed."""
    documents: dict[str, bytes] = {}
    paths = ["/"]
    for path in paths:  # children are added while the list is walked
        node = await coordinator.get(path)
        if node is not None and node.data:
            shown = _SECRET_DOCUMENT.sub(rb'\1"(left out)"', node.data) if path == CLIENT_IDS else node.data
            documents["/cluster.json" if path == "/" else f"{path}.json"] = shown
        paths += [f"{path.rstrip('/')}/{name}" for name in await coordinator.children(path)]
    return documents


# -- the archive ----------------------------------------------------------------------------------------------------------


def strip_secrets(text: str) -> str:
    """Replace the values of secret settings and passwords in a configuration file; the names of settings stay."""
    return _WITH_PASSWORD.sub(r"\1***@", _SECRET.sub(rf"\1 {STRIPPED}", text))


@dataclass
class Bundle:
    files: dict[str, bytes] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    """Item that could not be collected → reason."""

    def put(self, name: str, content: bytes) -> None:
        assert name not in self.files, name
        self.files[name] = content

    def put_json(self, name: str, value: Mapping[str, Any]) -> None:
        self.put(name, (json.dumps({"version": JSON_VERSION, **value}, indent=1, sort_keys=True) + "\n").encode())

    def packed(self) -> bytes:
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

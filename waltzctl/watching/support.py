"""`waltzctl support bundle`: what somebody who helps wants to see, in one archive, without payloads and without secrets.

Nothing of a log's content is ever asked for: only what daemons say of themselves, and the documents of the coordinator.
What could not be collected is named in the archive itself, because it is often what is wrong.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from waltzctl.options import Timeout
from waltzctl.reach import Meant, Reach
from waltzctl.watching.bundle import Bundle, strip_secrets
from waltzd.client import loop
from waltzd.errors import EXIT_OK, EXIT_PARTIAL

CALL_SECONDS = 5.0


def bundle(
    *,
    to: Annotated[
        Path | None,
        Option(
            "--to",
            dir_okay=False,
            metavar="FILE.tar.gz",
            help="Where to; waltz-support-CLUSTER-TIME.tar.gz here by default.",
        ),
    ] = None,
    seconds: Timeout = CALL_SECONDS,
    reach: Meant,
) -> int:
    """Collect what somebody who helps wants to see, in one archive: status, checks of the doctor, the documents in
    ZooKeeper, what every daemon says of itself, its newest log lines, who changed what, versions, and the configuration of
    a cluster on this machine.

    It has no payloads. Values of settings that may be secret are taken out, and so are paths of keys. The file is there
    whole or not at all, and never takes the place of another one. The end is 7 when something could not be collected.

    \b
    Examples:
      waltzctl support bundle
      waltzctl support bundle --to /tmp/bundle.tar.gz
    """
    found, name, at = loop.run(_collect(reach, seconds))
    stamp = "".join(letter for letter in at if letter.isalnum())
    path = to or Path(f"waltz-support-{name}-{stamp}.tar.gz")
    size = found.write(path)
    typer.echo(str(path))
    typer.echo(f"{len(found.files)} files, {size:,} bytes; no payloads, no secrets", err=True)
    for what, why in sorted(found.missing.items()):
        typer.echo(f"missing: {what}: {why}", err=True)
    return EXIT_PARTIAL if found.missing else EXIT_OK


async def _collect(reach: Reach, seconds: float) -> tuple[Bundle, str, str]:
    """With the name of the cluster and the moment of the look."""
    from importlib.metadata import version
    from platform import python_version

    from waltzctl.show.cluster import status
    from waltzctl.show.forms import plain
    from waltzctl.show.watching import checks, events
    from waltzctl.watching.description import describe, metadata_tree
    from waltzctl.watching.diagnosis import diagnose
    from waltzctl.watching.examination import examine
    from waltzctl.watching.listen import Listening, history_of, told_lines
    from waltzctl.watching.poll import Poll
    from waltzd.errors import WaltzError

    found = Bundle()
    async with Poll(reach, seconds=seconds, aloud=True) as poll:
        sighting = await poll.look()
        picture = sighting.picture
        found.put_json("status.json", status(sighting).document)
        found.put_json("doctor.json", checks(diagnose(await examine(reach, sighting, seconds=seconds))).document)
        for name, error in picture.silent.items():
            found.missing[f"daemons/{name}.json"] = f"{error.code} {error.message}"
        for name, described in describe(picture).items():
            found.put_json(f"daemons/{name}.json", described)
        history = []
        if sighting.lost is None:
            try:
                cluster = await poll.cluster()
                for path, document in (await metadata_tree(cluster.coordinator)).items():
                    found.put(f"metadata{path}", document)
                history = await history_of(cluster)
            except WaltzError as error:
                found.missing["metadata"] = f"{error.code} {error.message}"
        else:
            found.missing["metadata"] = f"{sighting.lost.cause.code} {sighting.lost.cause.message}"
        found.put_json("history.json", {"history": [plain(entry) for entry in history]})
        async with Listening(picture.meta.key, reach.tls, seconds=seconds) as listening:
            told = await listening.listen(picture)
        lines = told_lines(told, history, since_ms=0, level="debug")
        found.put_json("events.json", events(lines).document)
        for name, silent in listening.silent.items():
            found.missing[f"events of {name}"] = f"{silent.code} {silent.message}"
        versions = {view.meta.name: None if view.said is None else view.said.version for view in picture.nodes}
        tool = {"waltzctl": version("waltz"), "python": python_version()}
        found.put_json("versions.json", {**tool, "daemons": versions, "collected": sighting.at, "epoch": int(time.time())})
    if reach.directory is not None:
        for file in sorted(reach.directory.glob("*/*.yml")):
            try:
                found.put(f"config/{file.parent.name}.yml", strip_secrets(file.read_text(encoding="utf-8")).encode())
            except (OSError, UnicodeDecodeError) as trouble:
                found.missing[f"config/{file.parent.name}.yml"] = str(trouble)
    found.put_json("missing.json", {"missing": found.missing})
    return found, picture.meta.name, sighting.at

"""Two versions on one cluster: a rolling upgrade in each order and back, under load, and versions that must be refused.

The version before and one of the future are wheels in environments of their own (`tests/process/versions.py`)."""

from __future__ import annotations

import asyncio
import re
import shlex
import subprocess
import sys
from collections.abc import Coroutine, Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.process.cluster import Cluster
from tests.process.race import Race
from tests.process.versions import BEFORE, environment
from tests.release.packages import ROOT
from waltzctl import main
from waltzctl.placement.cluster import finalize_plan
from waltzctl.snapshot.cluster_snapshot import ClusterSnapshot
from waltzd.client import loop
from waltzd.errors import EXIT_OK
from waltzd.errors.operations import Unsafe
from waltzd.protocol.level import THIS

RACED = (0, 1)
RATE = 50
"""Transactions in a second: there is some load in each state of the cluster, and no step waits for a processor."""
OTHER = 3
"""Partition of the client of the version before: the checker knows nothing of what it writes."""
PATIENCE_SECONDS = 600
APPEND = f"""
import sys
from waltzd import BlockingClient, Committed
from waltzd.client.settings import ClientSettings
with BlockingClient(servers=sys.argv[1], partitions=[{OTHER}]) as client:
    assert isinstance(client.append(b"of before", partition={OTHER}), Committed)
"""
NEXT = (
    ("waltzd/protocol/level.py", "RELEASE: Release = 0, 1\n", "RELEASE: Release = 0, 2\n"),
    ("waltzd/protocol/level.py", "(0, 1): 1}", "(0, 1): 1, (0, 2): 2}"),
)


def run(work: Coroutine[Any, Any, None]) -> None:
    loop.run(asyncio.wait_for(work, PATIENCE_SECONDS))


def begin(cluster: Cluster, name: str, python: str) -> None:
    """Start a daemon that does not run, with the version of this interpreter."""
    cluster.local.daemons[name].command[0] = python
    cluster.spawn(name)


def end(cluster: Cluster, name: str) -> None:
    cluster.local.daemons[name].ask_to_end()
    assert cluster.local.daemons[name].wait_end(60)


def versions(found: ClusterSnapshot) -> set[str]:
    reported = [*(view.reported for view in found.servers), *(view.reported for view in found.storages)]
    return {one.version for one in reported if one is not None}


def finalize(cluster: Cluster, *options: str) -> int:
    arguments = ["cluster", "finalize", "--confirm", "local", *options]
    return main.run([*arguments, "--directory", str(cluster.local.directory)])


async def roll(cluster: Cluster, race: Race, names: Iterable[str], python: str) -> None:
    for name in names:
        end(cluster, name)
        begin(cluster, name, python)
        await race.more(20)
        await cluster.settled()


def test_a_cluster_is_upgraded_in_each_order_and_back_and_then_finalized(tmp_path: Path) -> None:
    before, now = str(environment(BEFORE, "0.0.0")), sys.executable
    cluster = Cluster.make(tmp_path / "cluster", partitions=4, session_seconds=2)
    for daemon in cluster.local.daemons.values():
        if daemon.command[0] == now:  # not ZooKeeper
            daemon.command[0] = before
    (tmp_path / "history").mkdir()

    async def upgrade() -> None:
        storages, servers = cluster.storage_names, cluster.server_names
        assert (await cluster.local.snapshot()).meta.level == 0
        assert versions(await cluster.local.snapshot()) == {"0.0.0"}
        race = Race(tmp_path / "history", cluster.server_addresses, tag="upgrade", partitions=RACED, rate=RATE)
        async with race.running():
            for python, order in (
                (now, (*storages, *servers)),
                (before, (*storages, *servers)),
                (now, (*servers, *storages)),
            ):
                await roll(cluster, race, order, python)
                append = [before, "-P", "-c", APPEND, cluster.servers]
                await asyncio.to_thread(subprocess.run, append, check=True, cwd=tmp_path)
                if python == before:
                    with pytest.raises(Unsafe, match=rf"version 0\.0\.0\).* not support level {THIS.level}"):
                        finalize_plan(await cluster.local.snapshot())
        verdict = await race.verdict(cluster.storage_addresses, cluster.key)
        assert verdict.is_sound, str(verdict)
        assert race.failures == []
        assert "0.0.0" not in versions(await cluster.local.snapshot())

    async def refused() -> None:
        assert (await cluster.local.snapshot()).meta.level == THIS.level
        storage, server = cluster.storage_names[0], cluster.server_names[0]
        end(cluster, storage)
        begin(cluster, storage, before)
        await cluster.until("the storage of before is out", lambda found: is_out(found, storage))
        await ends(cluster, server, before, "level is not known to this version of Waltz")
        end(cluster, storage)
        for name in (storage, server):
            begin(cluster, name, now)
        await cluster.settled()

    try:
        cluster.start()
        run(upgrade())
        assert finalize(cluster, "--dry-run") == EXIT_OK
        assert finalize(cluster, "--reason", "it is the last test") == EXIT_OK
        assert finalize(cluster) == EXIT_OK, "there is nothing to do a second time"
        run(refused())
    finally:
        cluster.close()


def test_the_page_of_upgrades_can_be_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From this version to the next one, by what `docs/upgrade.md` says in its order, with one step back."""
    now, after = sys.executable, str(environment("HEAD", "0.2.0", *NEXT))
    cluster = Cluster.make(tmp_path / "cluster", partitions=4, session_seconds=2)
    blocks = re.findall(r"^```sh\n(.*?)^```", (ROOT / "docs/upgrade.md").read_text(encoding="utf-8"), re.M | re.S)
    before, for_storage, for_server, shown, finalize = blocks
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WALTZ_DIRECTORY", str(cluster.local.directory))

    def typed(block: str, python: str = now) -> str:
        """Type the lines of a block, as a person who says yes; those of this version in this process."""
        block = block.replace("server drain", "server drain --yes")
        if python == now:
            capsys.readouterr()
            for line in block.splitlines():
                words = shlex.split(line, comments=True)
                assert main.run(words[1:]) == EXIT_OK, line + str(capsys.readouterr())
            return capsys.readouterr().out
        script = f'waltzctl() {{ "{python}" -P -m waltzctl "$@"; }}\n{block}'
        done = subprocess.run(["bash", "-e", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, block + done.stdout + done.stderr
        return done.stdout

    def renew(block: str, example: str, name: str, python: str) -> None:
        first, on_its_machine, then = re.split("(^# on its machine.*\n)", block, flags=re.M)
        assert "stop the daemon, install the new version, start the daemon" in on_its_machine
        typed(first.replace(example, name))
        end(cluster, name)
        begin(cluster, name, python)
        typed(then)

    try:
        cluster.start()
        assert "nothing to do: cluster finalize local" in typed(before)
        storages = [(for_storage, "storage-1", name) for name in cluster.storage_names]
        servers = [(for_server, "server-1", name) for name in cluster.server_names]
        for block, example, name in [*storages, *servers]:
            renew(block, example, name, after)
        renew(*servers[-1], now)
        assert typed(shown).count("0.2.0") == 4
        assert typed(shown).count("0.1.0") == 1
        renew(*servers[-1], after)
        assert typed(shown).count("0.2.0") == 5
        assert f"raise the level of the cluster local from {THIS.level} to 2" in typed(finalize, after)
        assert typed("waltzctl cluster finalize --dry-run", after) == "nothing to do: cluster finalize local\n"
    finally:
        cluster.close()


def is_out(found: ClusterSnapshot, storage: str) -> bool:
    """Return whether the owners say that the storage is too old for the cluster."""
    reported = [view.reported for view in found.partitions]
    stories = [one.story for owned in reported if owned is not None for one in owned.replicas if one.storage == storage]
    return bool(stories) and all(f"finalized at level {THIS.level}" in story for story in stories)


async def ends(cluster: Cluster, server: str, python: str, why: str) -> None:
    """A server of this version ends at its start, and was never in the list of servers."""
    end(cluster, server)
    begin(cluster, server, python)
    await cluster.gone(server)
    assert why in cluster.local.daemons[server].words()
    assert server not in [view.meta.name for view in (await cluster.local.snapshot()).servers]

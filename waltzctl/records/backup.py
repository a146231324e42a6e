"""`waltzctl archive status --lost-now`: how much would be lost if all storages failed at this moment."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING

from waltzctl.shell.cluster_target import ClusterOptions, ClusterTarget, using
from waltzctl.show.forms import put, put_again, screen_for
from waltzd.errors import WaltzError
from waltzd.errors.exit_codes import EXIT_FINDINGS, EXIT_OK

if TYPE_CHECKING:
    from waltzctl.show.archive import Backups
    from waltzctl.snapshot.cluster_snapshot import ClusterSnapshot
    from waltzd.cluster.cluster import Cluster

LATE_SECONDS = 60.0
"""Lag from which the exit code reports findings; ten seconds are usual."""


def show_loss(store: str | None, watch: float | None, given: ClusterOptions, output: str) -> int:
    """Show the loss as the owners report it, or as the store shows it if one is given. Return the exit code."""
    target = given.target() if store is None else None
    if watch is None:
        found = _fetch(store, target)
        put(found.page(), output)
        return _code(found)
    return _watch(store, target, watch, output)


def _code(found: Backups) -> int:
    return EXIT_FINDINGS if found.is_behind(LATE_SECONDS) else EXIT_OK


def _fetch(store: str | None, target: ClusterTarget | None) -> Backups:
    if store is not None:
        return _in_store(store)
    assert target is not None
    return using(target, lambda cluster: _from_owners(cluster, target))


def _watch(store: str | None, target: ClusterTarget | None, every: float, output: str) -> int:
    """Show the loss repeatedly until Ctrl-C; return the exit code of the last time."""
    code = EXIT_FINDINGS

    with suppress(KeyboardInterrupt), screen_for(output) as screen:
        while True:
            found: Backups | WaltzError
            try:
                found = _fetch(store, target)
                code = _code(found)
            except WaltzError as error:
                found, code = error, error.exit_code
            put_again(found if isinstance(found, WaltzError) else found.page(), output, screen, every)
            time.sleep(every)
    return code


async def _from_owners(cluster: Cluster, target: ClusterTarget) -> Backups:
    from waltzctl.snapshot.collector import take_snapshot

    return backed_up(await take_snapshot(cluster.coordinator, tls=target.tls))


def backed_up(snapshot: ClusterSnapshot) -> Backups:
    """Return the loss as owners and the leader report it."""
    from waltzctl.show.archive import BackedUpPartition, Backups, SavedMetadata

    rows = []
    for view in snapshot.partitions:
        reported = view.reported
        is_kept = reported is not None and reported.backed_up_to is not None
        rows.append(
            BackedUpPartition(
                partition=view.partition,
                committed=None if reported is None else reported.committed,
                backed_up=None if reported is None else reported.backed_up_to,
                transactions=reported.lost_now if reported is not None and is_kept else None,
                seconds=reported.backup_lag_ms / 1000 if reported is not None and is_kept else None,
                moment=0 if reported is None or reported.backed_up is None else reported.backed_up.moment,
                trouble="its owner does not say"
                if reported is None
                else reported.backup_trouble or reported.archive_trouble,
            )
        )
    metadata = None
    for server in snapshot.servers:
        saved = None if server.reported is None else server.reported.metadata_backup
        if saved is not None:
            age = saved.age_ms / 1000 if saved.age_ms >= 0 else None
            metadata = SavedMetadata(number=saved.number, seconds=age, moment="", trouble=saved.trouble)
    return Backups(place="", partitions=rows, metadata=metadata)


def _in_store(place: str) -> Backups:
    """Return the loss as the store alone shows it."""
    from waltzctl.show.archive import BackedUpPartition, Backups, SavedMetadata
    from waltzd.archive.location import open_archive
    from waltzd.archive.metadata import newest_metadata
    from waltzd.archive.unsealed import unsealed_index_at
    from waltzd.archive.verification import survey
    from waltzd.cluster.metadata import read
    from waltzd.protocol.timelines import FIRST

    store = open_archive(place)
    found, now = survey(store), time.time_ns() // 1000
    rows = []
    for number in sorted({*found.manifests, *(partition for partition, _ in found.unsealed)}):
        trouble = next((flaw.detail for flaw in found.flaws if flaw.partition == number), "")
        tail, last = None, found.manifests[number].last if number in found.manifests else -1
        try:
            timeline = found.manifests[number].timeline if number in found.manifests else FIRST
            tail = unsealed_index_at(store, found.label, number, timeline)
        except WaltzError as error:
            trouble = trouble or f"{error.code} {error.message}"
        moment = 0 if tail is None else tail.moment
        rows.append(
            BackedUpPartition(
                partition=number,
                committed=None,
                backed_up=max(last, -1 if tail is None else tail.last),
                transactions=None,
                seconds=max(0.0, (now - moment) / 1e6) if moment else None,
                moment=moment,
                trouble=trouble,
            )
        )
    metadata, newest = None, newest_metadata(store)
    if newest is not None:
        number, text = newest
        metadata = SavedMetadata(number=number, seconds=None, moment=read(text, f"metadata {number}").moment, trouble="")
    return Backups(place=store.place, partitions=rows, metadata=metadata)

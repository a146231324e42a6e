"""`waltzctl archive`: coverage, verification, repair and signatures of the archive.

`status` asks the cluster, or reads a store that is named. The other commands read only the store, as an archive outlives
its cluster."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from waltzctl.placement.backup import End, MaybeEnding, cut_rows, moment_of, source_at
from waltzctl.records import backup
from waltzctl.shell.blueprint import write_new
from waltzctl.shell.change import ConfirmOptions, agree, put_plan
from waltzctl.shell.cluster_target import ClusterOptions, unprotected, using
from waltzctl.shell.numbers import check_partitions, format_partitions, partitions_of
from waltzctl.shell.options import Misused, Output, Watch
from waltzctl.shell.progress import Progress, Shown, ShownProgress
from waltzctl.shell.safety import Plan
from waltzctl.show.forms import (
    AnyForm,
    Column,
    Columns,
    Line,
    Listing,
    Part,
    attributes,
    draw,
    objects,
    put,
    put_json,
    verdict,
    warnings,
)
from waltzctl.show.terminal import console, count, size
from waltzctl.snapshot.cluster_snapshot import ClusterSnapshot
from waltzctl.snapshot.collector import take_snapshot
from waltzd.archive.listing import METADATA_FOLDER, branches_in, label_of, metadata_in, metadata_name, newest_metadata
from waltzd.archive.location import open_archive, open_store
from waltzd.archive.manifest import Entry, Label, Manifest, manifest_name
from waltzd.archive.repair import RepairedStore, put_back, rebuilt_key, rebuilt_objects
from waltzd.archive.signature import VARIABLE, SignedStore, is_signed, key_of_environment, sign_all, unsigned_among
from waltzd.archive.signature import new_key as fresh
from waltzd.archive.store import Listed, Store, read_object
from waltzd.archive.unsealed import unsealed_index_name
from waltzd.archive.upload import PartitionArchive
from waltzd.archive.verification import Flaw, Survey, branch_flaws, check_key, check_piece, check_unsealed, survey
from waltzd.cluster.cluster import Cluster, all_archived
from waltzd.cluster.documents import ArchiveMeta
from waltzd.cluster.metadata import read
from waltzd.disk.real import RealDisk
from waltzd.disk.seam import join, opened
from waltzd.errors import EXIT_FINDINGS, EXIT_OK, EXIT_PARTIAL, BadArgument, WaltzError
from waltzd.errors.operations import ObjectAbsent, StoreUnavailable, Unsafe
from waltzd.format.layout import index_name, segment_name
from waltzd.protocol.document import sha256_of

Place = Annotated[str, Argument(metavar="STORE", help="Archive, as set for storages: a directory, or s3://bucket/folder.")]
SHOWN = 5


def status(
    *,
    store: Annotated[
        str | None, Argument(metavar="[STORE]", help="Ask this store, and no cluster: a directory, or s3://bucket/folder.")
    ] = None,
    end: MaybeEnding,
    is_loss: Annotated[
        bool, Option("--lost-now", help="Show instead how much would be lost if all storages failed at this moment.")
    ] = False,
    watch: Watch = None,
    is_timelines: Annotated[
        bool, Option("--timelines", help="List instead the timelines of each partition in the STORE.")
    ] = False,
    given: ClusterOptions,
    output: AnyForm = "table",
) -> int:
    """Show how far each partition is archived, and why archiving stopped. The owners of the partitions are asked; `archive
    verify` checks the objects in the store.

    Transactions below the floor of a partition are in the archive only; `waltzctl cluster set --keep-local 7d` sets how
    much storages keep. A committed transaction that is not archived is in the segment that is still written, or waits for
    the store. Owners check within a day that each archived object exists: `checked` is when the last check began, and
    `missing` lists lost objects. The exit code is 8 if archiving stopped or an object is missing, else 7 if an owner did
    not answer.

    With a STORE no cluster is asked: show the last id of each partition that a restore would bring back, and what it would
    leave out. The end is the newest moment for which the store is complete, unless --through or --through-marks sets
    another. The JSON output is a file for `waltzctl cluster restore STORE --through-marks FILE`; edit its marks to fork the
    log at other ids.

    With --lost-now show for each partition how many transactions, and how many seconds of them, are committed and not in
    the store, and the age of the saved documents of the cluster. Without a STORE the owners report exact numbers. With a
    STORE only the store is read. The exit code is 8 if the backup stopped or is more than a minute behind.

    With --timelines list where a rescue or a restore ended the log of a partition in the STORE, and the last id of each
    timeline. The last timeline of a partition is the current one. An older one stays readable above its fork, for
    `--timeline` of `waltzctl cluster restore`, until its folder is removed from the store by hand.

    \b
    Examples:
      waltzctl archive status
      waltzctl archive status /mnt/archive --latest
      waltzctl archive status s3://waltz-archive/orders --through 2026-11-23T14:00 -o json
      waltzctl archive status --lost-now --watch 5
      waltzctl archive status /mnt/archive --lost-now -o json
      waltzctl archive status /mnt/archive --timelines
    """
    if end.is_given + is_loss + is_timelines > 1:
        raise Misused("--lost-now, --timelines and an end (--latest, --through, --through-marks) exclude each other.")
    if watch is not None and not is_loss:
        raise Misused("--watch needs --lost-now.")
    if is_loss:
        return backup.show_loss(store, watch, given, output)
    if is_timelines:
        if store is None:
            raise Misused("--timelines needs a STORE.")
        return _timelines(store, output)
    if store is not None:
        return _marks(store, end, output)
    if end.is_given:
        raise Misused("An end (--latest, --through, --through-marks) needs a STORE.")
    target = given.target()

    async def ask(cluster: Cluster) -> list[Reaching]:
        return await reached(cluster, await take_snapshot(cluster.coordinator, tls=target.tls))

    found = using(target, ask)
    put(reaching(found), output)
    if any(one.trouble or one.missing for one in found):
        return EXIT_FINDINGS
    return EXIT_PARTIAL if any(one.committed is None for one in found) else EXIT_OK


def _marks(store: str, end: End, output: str) -> int:
    if not end.is_given:
        end = replace(end, latest=True)
    end.check()
    source = source_at(store, end.chosen)
    cut = source.cut_at(end, datetime.now(UTC))
    put(backup.marks(source.store.place, cut, moment_of(cut), cut_rows(cut, source.logs)), output)
    return EXIT_OK


async def reached(cluster: Cluster, snapshot: ClusterSnapshot) -> list[Reaching]:
    """Return the archive coverage from the documents and from the owners in a snapshot."""
    documents = await all_archived(cluster.coordinator)
    found = []
    for view in snapshot.partitions:
        meta, reported = documents.get(view.partition), view.reported
        found.append(
            Reaching(
                partition=view.partition,
                archived=None if meta is None else meta.last,
                committed=None if reported is None else reported.committed,
                floor=0 if meta is None else meta.floor,
                manifest=None if meta is None else meta.number,
                archive="" if meta is None else str(meta.archive),
                sha256="" if meta is None else meta.sha256,
                trouble="" if reported is None else reported.archive_trouble,
                checked_ms=None if reported is None or reported.archive_check is None else reported.archive_check.age_ms,
                missing="" if reported is None or reported.archive_check is None else reported.archive_check.missing,
            )
        )
    return found


def verify(
    *,
    store: Place,
    quick: Annotated[bool, Option("--quick", help="Check only that all objects exist, with their sizes.")] = False,
    partitions: Annotated[
        str | None, Option("--partitions", metavar="0-3,7", help="Partitions to check; all by default.")
    ] = None,
    with_cluster: Annotated[
        bool,
        Option("--with-cluster", help="Also compare with the documents of the running cluster."),
    ] = False,
    given: ClusterOptions,
    output: AnyForm = "table",
    progress: ShownProgress = Shown.AUTO,
) -> int:
    """Check an archive in its STORE: the manifests, all objects that they name, every byte of these, the chain of segments,
    and the saved documents of the cluster.

    The store is compared with the documents saved in it: a manifest, unsealed part or partition that they name and the
    store lacks is a finding, and so is a store without documents. No cluster is contacted without --with-cluster.

    All data is read, unless --quick is given; a bucket charges for that. The exit code is 8 if there are findings. Each
    finding names an object and its ids.

    \b
    Examples:
      waltzctl archive verify /mnt/archive
      waltzctl archive verify s3://waltz-archive/orders --quick -o json
    """
    opened, started = open_archive(store), time.monotonic()
    # Before the survey: what documents name is in the store before they do.
    saved = saved_documents(opened)
    known = [] if isinstance(saved, Flaw) else [saved]
    if with_cluster:
        known.append(using(given.target(), lambda cluster: all_archived(cluster.coordinator)))
    found = survey(opened)
    wanted = None if partitions is None else partitions_of(partitions)
    if wanted is not None:
        highest = max([*found.manifests, *(number for documents in known for number in documents)], default=-1)
        check_partitions(wanted, 1 + highest, not_done="nothing was checked")
        found.manifests = {number: one for number, one in found.manifests.items() if number in wanted}
    flaws = [flaw for flaw in found.flaws if wanted is None or flaw.partition in wanted]
    pieces = [(number, piece) for number in sorted(found.manifests) for piece in found.pieces[number]]
    flaws += [flaw for *_, flaw in _flawed(opened, found.label, pieces, is_quick=quick, progress=progress)]
    for one in (*found.manifests.values(), *found.older):
        if one.partition in found.manifests:
            flaws += branch_flaws(opened, found.label, one)
    for number, timeline in found.unsealed if not quick else ():
        if wanted is None or number in wanted:
            flaw = check_unsealed(opened, found, number, timeline)
            flaws += [flaw] if flaw is not None else []
    copies = metadata_in(opened)
    flaws += metadata_flaws(opened, found.label, copies[-1:] if quick or wanted is not None else copies)
    if isinstance(saved, Flaw) and saved.name not in {flaw.name for flaw in flaws}:
        flaws.append(saved)
    for documents in known:
        flaws += [flaw for flaw in missing_flaws(found, documents) if wanted is None or flaw.partition in wanted]
    seconds = time.monotonic() - started
    put(survey_page(opened.place, found, flaws, seconds, is_quick=quick, signatures=opened.seen), output)
    print_strange(found)
    return EXIT_FINDINGS if flaws else EXIT_OK


def saved_documents(store: Store) -> Mapping[int, ArchiveMeta] | Flaw:
    """Partition → how far its archive reached, as the newest saved documents state. Return a flaw if there are none, or if
    they cannot be read: then a lost partition is not noticed."""
    name = METADATA_FOLDER
    try:
        newest = newest_metadata(store)
        if newest is None:
            return Flaw(name=name, detail="the store has no saved documents of the cluster")
        name = metadata_name(newest[0])
        return read(newest[1], name).archives
    except WaltzError as error:
        if isinstance(error, StoreUnavailable):
            raise
        return Flaw(name=name, detail=error.message)


def missing_flaws(found: Survey, documents: Mapping[int, ArchiveMeta]) -> list[Flaw]:
    """Return flaws for objects that the documents of the cluster name and the store does not have."""
    flaws = []
    for number, meta in sorted(documents.items()):
        branches = [one for one in (found.manifests.get(number), *found.older) if one is not None]
        mine = next((one for one in branches if (one.partition, one.timeline) == (number, meta.timeline)), None)
        if mine is None or mine.number < meta.number:
            there = "has none of its timeline" if mine is None else f"ends with manifest {mine.number}"
            detail = f"the documents of the cluster know it, with ids up to {meta.last}; the store {there}"
            flaws.append(Flaw(name=manifest_name(number, meta.number, meta.timeline), partition=number, detail=detail))
        newest = meta.timeline if found.manifests.get(number) is None else found.manifests[number].timeline
        if (number, newest) not in found.unsealed:
            detail = "is not there: what no segment has yet is not backed up"
            flaws.append(Flaw(name=unsealed_index_name(number, newest), partition=number, detail=detail))
    return flaws


def metadata_flaws(store: Store, label: Label, saved: Sequence[Listed]) -> list[Flaw]:
    """Return flaws for saved documents of the cluster that are not what was saved, or not of this cluster."""
    flaws = []
    for one in saved:
        try:
            documents = read(read_object(store, one.name, one.size), one.name)
        except WaltzError as error:
            if isinstance(error, StoreUnavailable):
                raise
            flaws.append(Flaw(name=one.name, detail=error.message))
        else:
            if documents.meta.key != label.cluster:
                flaws.append(Flaw(name=one.name, detail=f"has the documents of the cluster {documents.meta.key}"))
    return flaws


def heal(
    *,
    store: Place,
    source: Annotated[
        str | None,
        Option("--from", metavar="DIRECTORY", help="Directory of a storage on this machine; it may run, and is only read."),
    ] = None,
    is_clean: Annotated[bool, Option("--clean", help="Delete leftovers of interrupted uploads instead.")] = False,
    quick: Annotated[bool, Option("--quick", help="Check only for missing objects and wrong sizes.")] = False,
    yes: Annotated[bool, Option("--yes", help="Answer the question with yes.")] = False,
    dry_run: Annotated[bool, Option("--dry-run", help="Show the plan and change nothing.")] = False,
    output: Output = "table",
    progress: ShownProgress = Shown.AUTO,
) -> int:
    """Restore lost or damaged objects of an archive: segments from the replicas of a storage, and the label, manifests,
    chunks and key indexes from the rest of the archive.

    Run it on the machine of a storage, with permission to write to the STORE. The archive is verified first. A file is
    restored only if it has the SHA-256 in the manifest, and only where the object is missing or damaged: a valid object is
    never overwritten. The output names objects that this storage does not have, and the exit code is 8; try another one.

    With --clean delete segments, key indexes and chunks that no manifest names although their ids are archived. Manifests,
    objects that a manifest may still name, and unknown objects stay. In a directory, hidden files that killed writers left
    more than a day ago are deleted as well. Storages may upload meanwhile. Nothing is deleted if the archive has damage.

    \b
    Examples:
      waltzctl archive heal /mnt/archive --from /var/lib/waltz --dry-run
      waltzctl archive heal s3://waltz-archive/orders --from /var/lib/waltz --quick --yes
      waltzctl archive heal /mnt/archive --clean --dry-run
    """
    if is_clean is (source is not None) or (is_clean and quick):
        raise Misused("Use either --from DIRECTORY, or --clean alone.")
    confirmation = ConfirmOptions(is_dry=dry_run, yes=yes)
    return (
        _clean(store, confirmation, output)
        if source is None
        else _put_back(store, source, quick, confirmation, output, progress)
    )


def _put_back(store: str, source: str, quick: bool, confirmation: ConfirmOptions, output: str, progress: Shown) -> int:
    opened = open_archive(store)
    again = rebuilt_objects(opened)
    found = survey(RepairedStore(opened, again))
    pieces = [(number, piece) for number in sorted(found.manifests) for piece in found.pieces[number]]
    flawed = _flawed(opened, found.label, pieces, is_quick=quick, progress=progress)
    held: list[tuple[int, Entry]] = []
    rest = list(found.flaws)
    for number, piece, flaw in flawed:
        if flaw.name != piece.name(number):
            key = key_of(opened, source, found.label, number, piece)
            again |= {} if key is None else {flaw.name: key}
            rest += [flaw] if key is None else []
        elif file_of(source, number, piece) is not None:
            held.append((number, piece))
        else:
            rest.append(flaw)
    steps = [f"make {name} again, out of the rest of the archive" for name in again]
    steps += [f"put back {piece.name(number)}, {size(piece.size)}, from {source}" for number, piece in held]
    plan = Plan(verb="archive heal", subject=opened.place, steps=tuple(steps))
    for flaw in rest:
        print_flaw(flaw, f"{source} does not have it; look on other storages, and for older versions in the store")
    if rest and not steps:
        put_plan(plan, output, result="impossible", healed=[], left=[flaw.name for flaw in rest])
        return EXIT_FINDINGS
    if not agree(plan, confirmation, unprotected(opened.place), output):
        return EXIT_FINDINGS if rest else EXIT_OK
    for name, made in again.items():
        put_back(opened, name, made)
    healed = [*again]
    for number, piece in held:
        data = file_of(source, number, piece)
        if data is None:  # a storage may remove what a manifest names
            rest.append(Flaw.of(piece, number, f"was not put back: the files of {source} have changed since the plan"))
            print_flaw(rest[-1], "look on other storages, and for older versions in the store")
            continue
        PartitionArchive(opened, found.label, number).put_back(piece, data)
        healed.append(piece.name(number))
    put_plan(plan, output, result="done", healed=healed, left=[flaw.name for flaw in rest])
    return EXIT_FINDINGS if rest else EXIT_OK


def _clean(store: str, confirmation: ConfirmOptions, output: str) -> int:
    from waltzd.archive.local import LocalStore

    opened = open_archive(store)
    found = survey(opened)
    if found.flaws:
        raise Unsafe(
            f"{opened.place}: {found.flaws[0].name} {found.flaws[0].detail}",
            not_done="nothing was removed",
            next_step="look at all of it with `waltzctl archive verify`; what is wrong may be what names these objects",
        )
    left = opened.inner.leftovers(time.time()) if isinstance(opened.inner, LocalStore) else ()
    steps = [f"remove {one.name}, {size(one.size)}" for one in (*found.orphans, *left)]
    plan = Plan(verb="archive heal --clean", subject=opened.place, steps=tuple(steps))
    print_strange(found)
    if not agree(plan, confirmation, unprotected(opened.place), output):
        return EXIT_OK
    for one in found.orphans:
        opened.remove(one.name)
    for one in left:
        assert isinstance(opened.inner, LocalStore)
        opened.inner.remove_leftover(one)
    removed = [one.name for one in (*found.orphans, *left)]
    put_plan(plan, output, result="done", removed=removed, pending=len(found.pending))
    return EXIT_OK


def _flawed(
    store: Store, label: Label, pieces: Sequence[tuple[int, Entry]], *, is_quick: bool, progress: Shown
) -> list[tuple[int, Entry, Flaw]]:
    total, done, flawed = sum(piece.stored_bytes for _, piece in pieces), 0, []
    with Progress("verifying", progress) as course:
        for number, piece in pieces:
            for flaw in (
                check_piece(store, label, number, piece, is_quick=is_quick),
                check_key(store, number, piece, is_quick=is_quick),
            ):
                flawed += [(number, piece, flaw)] if flaw is not None else []
            done += piece.stored_bytes
            course.update(done, total)
    return flawed


def file_of(directory: str, partition: int, piece: Entry) -> bytes | None:
    """Return the bytes of an archived object, built from the files of a replica in this storage directory; None if they are
    not the archived bytes."""
    disk, whole = RealDisk(), b""
    sizes = (segment_name(piece.first), piece.size - piece.index_bytes), (index_name(piece.first), piece.index_bytes)
    for name, wanted in sizes:
        file = opened(disk, join(join(directory, str(partition)), name)) if wanted else None
        if file is not None:
            with closing(file):
                whole += file.read(0, wanted)
    return whole if sha256_of(whole) == piece.sha256 else None


def key_of(store: Store, directory: str, label: Label, partition: int, piece: Entry) -> bytes | None:
    """Return the key index of an archived segment, made from the segment in the store, or from the files of a replica; None
    if neither has the archived bytes."""
    data: bytes | None = None
    with suppress(ObjectAbsent):
        data = store.get_range(piece.name(partition), 0, piece.size)
    if data is None or sha256_of(data) != piece.sha256:
        data = file_of(directory, partition, piece)
    return None if data is None else rebuilt_key(piece, data, label, partition)


def _timelines(store: str, output: str) -> int:
    opened = open_archive(store)
    found = branches_in(opened, label_of(opened, not_done="nothing was listed"))
    put(branches(found), output)
    return EXIT_OK


def sign(
    *,
    store: Annotated[str | None, Argument(metavar="[STORE]", help="Archive, as set for storages.")] = None,
    file: Annotated[
        Path | None,
        Option("--new-key", metavar="FILE", dir_okay=False, help="Create a key in a new file, which only you may read."),
    ] = None,
    yes: Annotated[bool, Option("--yes", help="Answer the question with yes.")] = False,
    dry_run: Annotated[bool, Option("--dry-run", help="Show the plan and change nothing.")] = False,
    output: Output = "table",
) -> int:
    """Sign the unsigned objects of an archive with the key in WALTZ_ARCHIVE_KEY: the label, manifests, unsealed parts and
    saved documents. Their content cannot be proven: verify the archive first, and compare it with the cluster by `archive
    status`. Nothing is signed if the archive has damage. Before, configure the key on all storages and servers, with
    `archive_unsigned: accepted`; afterwards remove that setting.

    With --new-key and no STORE create a key file. Configure the same key on every storage and server (`archive_key`), and
    set WALTZ_ARCHIVE_KEY for this tool. Never copy the key to the store: with it another log can be signed. No file is
    overwritten.

    \b
    Examples:
      waltzctl archive sign --new-key archive.key
      waltzctl archive sign --new-key archive.key -o json
      waltzctl archive sign /mnt/archive --dry-run
      waltzctl archive sign s3://waltz-archive/orders --yes
    """
    if (file is None) is (store is None):
        raise Misused("Name the STORE to sign, or use --new-key FILE.")
    return (
        _make_key(file, output) if file is not None else _sign(str(store), ConfirmOptions(is_dry=dry_run, yes=yes), output)
    )


def _make_key(file: Path, output: str) -> int:
    write_new(file, fresh())
    path = file.absolute()
    if output == "json":
        put_json({"archive_key": str(path)})
    else:
        typer.echo(f"archive_key: {path}\nexport {VARIABLE}={shlex.quote(str(path))}")
    return EXIT_OK


def _sign(store: str, confirmation: ConfirmOptions, output: str) -> int:
    key = key_of_environment()
    if key is None:
        raise BadArgument(
            f"{VARIABLE} names no key to sign with",
            not_done="nothing was signed",
            next_step="make one with `waltzctl archive sign --new-key FILE`, or name the one of the storages",
        )
    bare = open_store(store).inner
    found = survey(SignedStore(bare, key, accepts_unsigned=True))
    flaws = [*found.flaws, *metadata_flaws(SignedStore(bare, key, accepts_unsigned=True), found.label, metadata_in(bare))]
    if flaws:
        raise Unsafe(
            f"{bare.place}: {flaws[0].name} {flaws[0].detail}",
            not_done="nothing was signed",
            next_step="look at all of it with `waltzctl archive verify`",
        )
    strange = {one.name for one in found.strange}
    names = [one.name for one in bare.list("") if is_signed(one.name) and one.name not in strange]
    unsigned = unsigned_among(bare, key, names)
    plan = Plan(verb="archive sign", subject=bare.place, steps=tuple(f"sign {name}" for name in unsigned))
    print_strange(found)
    if not agree(plan, confirmation, unprotected(bare.place), output):
        return EXIT_OK
    put_plan(plan, output, result="done", signed=sign_all(bare, key, unsigned))
    return EXIT_OK


# -- what people read of archives --------------------------------------------------------------------------------------


# -- how far archives reach --------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Reaching:
    """Archive coverage of one partition."""

    partition: int
    archived: int | None
    committed: int | None
    """Last committed id, as the owner reports it; None if it does not answer."""
    floor: int
    """First id that storages hold."""
    manifest: int | None
    archive: str
    sha256: str
    trouble: str
    checked_ms: int | None
    """Age of the start of the last complete check of the archived objects; None if there was none."""
    missing: str

    @property
    def checked(self) -> str:
        """For people."""
        if self.missing:
            return "incomplete"
        if self.checked_ms is None:
            return "" if self.archived is None else "not yet"
        hours = self.checked_ms / 3_600_000
        return f"{hours:.0f} h ago" if hours >= 1 else f"{60 * hours:.0f} min ago"

    @property
    def behind(self) -> int | None:
        """Committed transactions that are not archived: at least what stands in the segment that is being written."""
        return None if self.committed is None else self.committed - (-1 if self.archived is None else self.archived)


REACHING: Columns[Reaching] = (
    Column("partition"),
    Column("archived", json="archived_to"),
    *attributes("committed behind floor manifest"),
    Column("checked", json=""),
    Column("", "checked_ms", json="checked_ms_ago"),
    *attributes("archive sha256 trouble missing", is_wide=True),
)


def troubles(found: Sequence[Reaching]) -> list[str]:
    """Return a sentence for each trouble, with all partitions that have it."""
    sentences: dict[str, list[int]] = {}
    for one in found:
        for trouble, words in ((one.trouble, "does not go on"), (one.missing, "lacks what was in it")):
            if trouble:
                sentences.setdefault(f"{words}: {trouble}", []).append(one.partition)
    told = [f"{format_partitions(numbers)}: the archive {sentence}" for sentence, numbers in sentences.items()]
    silent = [one.partition for one in found if one.committed is None]
    return [
        *told,
        *([f"{format_partitions(silent)}: no owner answers, so it is not known whether it is archived"] * bool(silent)),
    ]


def reaching(found: Sequence[Reaching]) -> Listing[Reaching]:
    unused = "Nothing is archived yet: no segment is full, or no storage has the setting `archive`."
    notes: list[Part] = [*warnings(troubles(found)), *([] if any(one.archive for one in found) else [unused])]
    return Listing(kind="partitions", columns=REACHING, rows=found, notes=notes)


# -- what is in a store ------------------------------------------------------------------------------------------------


FLAWS: Columns[Flaw] = (Column("object", "name"), *attributes("partition first last detail"))
BRANCHES: Columns[Manifest] = (
    Column("partition"),
    Column("timeline", "lineage.number"),
    Column("fork", lambda one: one.lineage.fork if one.lineage.later else None),
    Column("archived", "last", json="archived_to"),
    Column("segments", "total.segments"),
    Column("shared", json="shared_segments"),
    Column("began", lambda one: one.lineage.later[-1].began if one.lineage.later else None),
    Column("cause", lambda one: one.lineage.later[-1].cause if one.lineage.later else None),
    Column("identity", lambda one: str(one.timeline), is_wide=True),
)


def branches(found: Sequence[Manifest]) -> Listing[Manifest]:
    """Return the timelines in a store, by partition and order."""
    return Listing(kind="timelines", columns=BRANCHES, rows=found)


SIGNATURES = {
    "verified": "signatures: {} verified",
    "unsigned": "{} without a signature: whoever could write to the store may have put them there",
    "unchecked": "{} signed, and not checked: WALTZ_ARCHIVE_KEY names no key",
}


def survey_page(
    place: str, found: Survey, flaws: Sequence[Flaw], seconds: float, *, is_quick: bool, signatures: Mapping[str, int]
) -> Listing[Flaw]:
    totals = [manifest.total for manifest in found.manifests.values()]
    segments, stored = sum(total.segments for total in totals), sum(total.stored_bytes for total in totals)
    how = "sizes of" if is_quick else "all bytes of"
    of = f"{count(segments, 'segment')} of {count(len(totals), 'partition')}, {size(stored)}"
    page: list[Part] = [
        verdict(count(len(flaws), "finding") if flaws else "clean", is_good=not flaws),
        *(part for flaw in flaws for part in ("", *flaw_lines(flaw))),
        f"{how} {of}, in {seconds:.1f} s",
        *(words.format(count(signatures[kind], "object")) for kind, words in SIGNATURES.items() if signatures.get(kind)),
        *([f"{count(len(found.orphans), 'orphan')}: `waltzctl archive heal --clean` removes them"] * bool(found.orphans)),
    ]
    content = {
        "result": "findings" if flaws else "clean", "store": place, "archive": str(found.label.archive),
        "cluster": str(found.label.cluster), "is_quick": is_quick, "seconds": round(seconds, 3),
        "partitions": [_partition_json(number, found) for number in sorted(found.manifests)],
        "signatures": {kind: signatures.get(kind, 0) for kind in SIGNATURES},
        "orphans": len(found.orphans), "pending": len(found.pending), "strange": [one.name for one in found.strange],
        "findings": objects(FLAWS, flaws),
    }  # fmt: skip
    return Listing(kind="findings", columns=FLAWS, rows=flaws, page=page, content=content)


def _partition_json(number: int, found: Survey) -> dict[str, Any]:
    manifest, total = found.manifests[number], found.manifests[number].total
    return {
        "partition": number, "manifest": manifest.number, "sha256": manifest.sha256, "first": total.first,
        "last": total.last, "segments": total.segments, "record_bytes": total.record_bytes, "crc": f"{total.crc:08x}",
        "bytes": total.stored_bytes,
    }  # fmt: skip


def flaw_lines(flaw: Flaw) -> list[Part]:
    ids = [] if flaw.first is None else [f"  partition {flaw.partition}, ids {flaw.first:,} to {flaw.last:,}"]
    return [Line(flaw.name, "bold"), *ids, f"  {flaw.detail}"]


def print_flaw(flaw: Flaw, why: str) -> None:
    """Print a flaw that stays, and why."""
    draw(console(to_stderr=True), [*flaw_lines(flaw), f"  {why}"])


def print_strange(found: Survey) -> None:
    """Print a note about objects that belong to no archive; they are not touched."""
    if found.strange:
        text = f"{count(len(found.strange), 'object')} that no archive has: {found.strange[0].name}"
        draw(console(to_stderr=True), [text if len(found.strange) == 1 else f"{text} and others"])

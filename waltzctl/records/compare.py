"""`waltzctl partition compare`: compare the replicas of a partition byte for byte.

The storages hash their records; this module compares the hashes. A storage hashes only records that it knows to be
committed, so a replica that lags is compared up to its own mark. What a storage has trimmed is in the archive only, so the
comparison begins at the highest trim floor. Only the first difference of each replica is fetched.

`comparison` is a pure generator: it yields a `Question` for the digests of a range on some replicas, and is sent the
answers. Most ranges are equal everywhere. If one is not, the largest group of equal replicas continues, and each other
replica is bisected against it: the first differing half holds the first difference, so a range of n ids takes log2 n
questions. An answer may cover only the beginning of its range; the rest is asked next. A replica that does not answer is
unknown from there on, and never counted as equal.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeAlias
from uuid import UUID

from typer import Argument, Option

from waltzctl.records.decode import decoded, line
from waltzctl.shell.cluster_target import ClusterTarget, CommandTarget, check_operator, unknown, using
from waltzctl.shell.numbers import check_partitions
from waltzctl.shell.progress import Shown, ShownProgress, Waiting
from waltzctl.show.forms import AnyForm, Column, Columns, Line, Listing, Part, Table, objects, put
from waltzctl.show.terminal import count, size
from waltzctl.snapshot.cluster_snapshot import ClusterSnapshot, StorageView
from waltzctl.snapshot.collector import take_snapshot
from waltzd.cluster.cluster import STORAGES, Cluster
from waltzd.cluster.documents import Membership, StorageMeta
from waltzd.errors import EXIT_FINDINGS, EXIT_OK, EXIT_PARTIAL, BadArgument, CannotConnect, NoSuchPartition, WaltzError
from waltzd.errors.operations import BadMetadata
from waltzd.format.record import Digest, Record
from waltzd.protocol.descriptions import ReplicaStatus
from waltzd.wire.storages import AdminClient, ReplicaClient

READ_SECONDS = 10.0


def compare(
    *,
    partition: Annotated[int, Argument(min=0, metavar="PARTITION")],
    names: Annotated[
        tuple[str, ...],
        Option("--storage", metavar="NAME", help="Compare only the replicas on these storages; all by default."),
    ] = (),
    seconds: Annotated[
        float, Option("--timeout", min=0.1, metavar="SECONDS", help="Timeout of each answer of a storage.")
    ] = 30.0,
    target: CommandTarget,
    output: AnyForm = "table",
    progress: ShownProgress = Shown.AUTO,
) -> int:
    """Compare the committed records of the replicas of PARTITION while the cluster runs. Each storage hashes its replica;
    records are sent only if replicas differ. Records that a storage has trimmed are not compared.

    The exit code is 8 if replicas differ, and 7 if one could not be compared.

    \b
    Examples:
      waltzctl partition compare 0
      waltzctl partition compare 1 -o json
    """
    check_operator(target.tls, "compare what replicas hold")
    with Waiting(progress) as waiting:
        found = using(target, lambda cluster: _compare(cluster, target, partition, names, seconds, waiting))
    put(comparison_page(found), output)
    return found.exit_code


async def _compare(
    cluster: Cluster, target: ClusterTarget, partition: int, names: tuple[str, ...], seconds: float, waiting: Waiting
) -> Comparison:
    snapshot = await take_snapshot(cluster.coordinator, tls=target.tls)
    chosen = _chosen(snapshot, partition, names)
    there = {view.meta.name: view for view in snapshot.storages}
    roles = snapshot.partitions[partition].replicas
    marks: dict[str, int] = {}
    floors: list[int] = []
    troubles: dict[str, WaltzError] = {}
    last_ids: dict[str, int] = {}
    for name in chosen:
        found = _status(there[name], partition) if name in there else _undocumented(snapshot, name)
        if isinstance(found, WaltzError):
            troubles[name] = found
        else:
            marks[name], last_ids[name] = visible_mark(found), found.last_id
            floors.append(found.floor)
    begin = max(floors, default=0)
    owned = snapshot.partitions[partition].reported
    committed = max([-1 if owned is None else owned.committed, *marks.values()])
    metas = {name: there[name].meta for name in marks}
    async with _Asking(partition, snapshot.meta.key, metas, target, seconds, waiting) as asking:
        standings = await asking.run(marks, begin)
        ids = {standing.difference[0] for standing in standings.values() if standing.difference is not None}
        differing = {id_: await asking.records([name for name in marks if marks[name] >= id_], id_) for id_ in sorted(ids)}
    standings |= {name: Standing(mark=-1, error=trouble) for name, trouble in troubles.items()}
    return Comparison(
        partition=partition,
        committed=committed,
        first_id=begin,
        replicas=tuple(
            Compared(
                storage=name,
                role=roles.get(name),
                standing=standings[name],
                last_id=last_ids.get(name),
                behind=max(0, committed - last_ids[name]) if name in last_ids else None,
            )
            for name in sorted(chosen)
        ),
        differing=differing,
        exchanges=asking.exchanges,
        hashed_bytes=asking.hashed_bytes,
    )


def visible_mark(status: ReplicaStatus) -> int:
    """Return the last id that the storage knows to be committed."""
    return max(status.committed, min(status.low_mark, status.last_id))


def _chosen(snapshot: ClusterSnapshot, partition: int, names: tuple[str, ...]) -> list[str]:
    check_partitions(
        [partition],
        snapshot.meta.partitions,
        has_group_log=snapshot.group_log is not None,
        not_done="nothing was compared",
    )
    there = {view.meta.name: view for view in snapshot.storages}
    replicas = snapshot.partitions[partition].replicas
    for name in names:
        if name not in there:
            raise unknown("storage", name, there, not_done="nothing was compared")
        if name not in replicas:
            raise NoSuchPartition(
                f"storage {name} has no replica of partition {partition}",
                not_done="nothing was compared",
                next_step=f"there are replicas on {', '.join(sorted(replicas))}",
            )
    chosen = list(dict.fromkeys(names)) or sorted(replicas)
    if len(names) and len(chosen) < 2:
        raise BadArgument(
            f"--storage {chosen[0]}: a comparison needs two replicas",
            not_done="nothing was compared",
            next_step="name two storages",
        )
    return chosen


def _undocumented(snapshot: ClusterSnapshot, name: str) -> WaltzError:
    """Return the reason why the address of a storage is unknown, although a replica is assigned to it."""
    return snapshot.unreadable.get(f"{STORAGES}/{name}") or BadMetadata(f"the cluster has no document of storage {name}")


def _status(view: StorageView, partition: int) -> ReplicaStatus | WaltzError:
    name = view.meta.name
    if view.reported is None:
        assert view.error is not None
        return view.error
    found = next((held for held in view.reported.assigned if held.partition == partition), None)
    if found is None:
        return NoSuchPartition(f"storage {name} holds nothing of partition {partition}")
    if found.status is None:
        return found.refused or NoSuchPartition(f"storage {name} is changing partition {partition}")
    return found.status


@dataclass
class _Asking:
    """Connections to the storages, with counters of the work."""

    partition: int
    key: UUID
    metas: Mapping[str, StorageMeta]
    target: ClusterTarget
    seconds: float
    waiting: Waiting
    exchanges: int = 0
    hashed_bytes: int = 0
    _ends: AsyncExitStack = field(default_factory=AsyncExitStack)
    _admins: dict[str, AdminClient] = field(default_factory=dict)

    async def __aenter__(self) -> _Asking:
        for name, meta in self.metas.items():
            admin = AdminClient(meta.admin_listen, self.key, seconds=self.seconds, tls=self.target.tls, name=name)
            self._admins[name] = await self._ends.enter_async_context(admin)
        return self

    async def __aexit__(self, *about: object) -> None:
        await self._ends.aclose()

    async def run(self, marks: Mapping[str, int], begin: int) -> dict[str, Standing]:
        conversation = comparison(marks, begin)
        try:
            question = next(conversation)
            while True:
                question = conversation.send(await self._answers(question))
        except StopIteration as end:
            standings: dict[str, Standing] = end.value
            return standings

    async def _answers(self, question: Question) -> Answers:
        self.exchanges += 1
        self.waiting.report(
            f"comparing ids {question.first_id:,} to {question.last_id:,} on {', '.join(question.replicas)}"
        )
        asked = [self._digest(name, question) for name in question.replicas]
        answers = dict(zip(question.replicas, await asyncio.gather(*asked), strict=True))
        self.hashed_bytes += sum(found.bytes for found in answers.values() if not isinstance(found, WaltzError))
        return answers

    async def _digest(self, name: str, question: Question) -> Digest | WaltzError:
        try:
            return await self._admins[name].digest(self.partition, question.first_id, question.last_id)
        except WaltzError as error:
            return error

    async def records(self, names: list[str], id_: int) -> dict[str, Record | WaltzError]:
        found = await asyncio.gather(*(self._record(name, id_) for name in names))
        return dict(zip(names, found, strict=True))

    async def _record(self, name: str, id_: int) -> Record | WaltzError:
        meta = self.metas[name]
        async with ReplicaClient(meta.listen, self.key, seconds=READ_SECONDS, tls=self.target.tls, name=name) as replica:
            try:
                async with asyncio.timeout(READ_SECONDS):
                    async for run in replica.read(self.partition, id_, id_):
                        return run.record(0)
                return CannotConnect(f"{name} answered without a record")
            except TimeoutError:
                return CannotConnect(f"{name} did not give record {id_} in {READ_SECONDS:g} seconds")
            except WaltzError as error:
                return error


# -- what people read of it --------------------------------------------------------------------------------------------


PAYLOAD_CHARACTERS = 400
"""Maximum number of characters of a payload that is cut at the end of the screen."""
LEAD_BYTES = 16
"""Number of bytes of a payload shown in front of the first difference."""


def _difference(replica: Compared) -> str:
    if replica.standing.difference is None:
        return ""
    first, last = replica.standing.difference
    return f"{first:,}" if first == last else f"in {first:,} to {last:,}"


COMPARED: Columns[Compared] = (
    Column("storage"),
    Column("role"),
    Column("records", "standing.verdict", json="verdict"),
    Column("compared up to", "standing.compared", cell=lambda end: f"{end:,}" if end >= 0 else "nothing"),
    *(Column("", json=name) for name in ("last_id", "behind")),
    Column("first difference", _difference, json=""),
    Column("", lambda replica: replica.standing.difference and
           dict(zip(("first_id", "last_id"), replica.standing.difference, strict=True)), json="first_difference"),
    Column("", "standing.error", json="error"),
)  # fmt: skip
HEADS: Columns[tuple[str, Record]] = (
    Column("storage", lambda head: head[0]),
    Column("request", lambda head: str(head[1].request)),
    Column("kind", lambda head: head[1].header),
    Column("size", lambda head: head[1].length),
    Column("data CRC", lambda head: f"{head[1].data_crc:08x}"),
    Column("CRC", lambda head: f"{head[1].crc:08x}"),
)


def comparison_page(found: Comparison) -> Listing[Compared]:
    """Return the verdict, a line for each replica, and the differing records side by side."""
    verdicts = {replica.standing.verdict for replica in found.replicas}
    alone = len(found.replicas) < 2 or Verdict.UNKNOWN in verdicts
    document = {
        "result": "different" if Verdict.DIFFERENT in verdicts else "unknown" if alone else "same",
        "partition": found.partition,
        "committed": found.committed,
        "first_id": found.first_id,
        "replicas": objects(COMPARED, found.replicas),
        "differing": [
            {"id": id_, "records": [{"storage": name, **_record_json(record)} for name, record in records.items()]}
            for id_, records in found.differing.items()
        ],
        "exchanges": found.exchanges,
        "hashed_bytes": found.hashed_bytes,
    }
    page = [
        Line(*_comparison_verdict(found)),
        Table(COMPARED, found.replicas),
        *(f"{one.storage}: {sentence}" for one in found.replicas for sentence in _sentences(one, found.committed)),
        *(part for id_, records in found.differing.items() for part in _differing(id_, records)),
        f"{count(found.exchanges, 'exchange')}, {size(found.hashed_bytes)} hashed",
    ]
    return Listing(kind="replicas", columns=COMPARED, rows=found.replicas, page=page, content=document)


def _differing(id_: int, records: Mapping[str, Record | WaltzError]) -> Iterator[Part]:
    """Yield the lines of a record as each replica holds it."""
    held = {name: record for name, record in records.items() if not isinstance(record, WaltzError)}
    yield Line(f"Record {id_}, as the replicas hold it:", "bold")
    yield Table(HEADS, list(held.items()))
    at = differing_byte([record.payload for record in held.values()])
    if at is not None:
        start = max(0, at - LEAD_BYTES)
        yield f"Byte {at:,} is the first of the payload that differs; from byte {start:,} on:"
        for name, record in held.items():
            yield Line(f"  {name}: {line(record.payload[start:], 'text', PAYLOAD_CHARACTERS)}", fit="cut")
    for name, error in records.items():
        if isinstance(error, WaltzError):
            yield Line(f"{name}: {error.code} {error.message}", "red")


def _comparison_verdict(found: Comparison) -> tuple[str, str]:
    verdicts = [replica.standing.verdict for replica in found.replicas]
    head = f"partition {found.partition}: "
    if Verdict.DIFFERENT in verdicts:
        firsts = [replica.standing.difference[0] for replica in found.replicas if replica.standing.difference is not None]
        odd = [replica.storage for replica in found.replicas if replica.standing.verdict is Verdict.DIFFERENT]
        others = verdicts.count(Verdict.SAME)
        who = f"{', '.join(odd)} from the {others} others" if others > 1 else "it cannot be told which of them is right"
        return f"{head}replicas differ, first at id {min(firsts):,}: {who}", "bold red"
    if len(found.replicas) < 2:
        return f"{head}{count(len(found.replicas), 'replica')}, and nothing to compare it with", "bold yellow"
    unknown = verdicts.count(Verdict.UNKNOWN)
    if unknown:
        sound = f"; the others hold the same, {_how_far(found)}" if unknown < len(verdicts) else ""
        return f"{head}{count(unknown, 'replica')} could not be compared{sound}", "bold yellow"
    return f"{head}{count(len(verdicts), 'replica')} hold the same, {_how_far(found)}", "bold green"


def _how_far(found: Comparison) -> str:
    ends = {replica.standing.compared for replica in found.replicas if replica.standing.verdict is Verdict.SAME}
    if len(ends) > 1:
        return "as far as each has come"
    end = ends.pop()
    begin = f"from id {found.first_id:,} " if found.first_id else ""
    return f"{begin}up to id {end:,}" if end >= 0 else "nothing yet"


def _sentences(replica: Compared, committed: int) -> list[str]:
    standing, found = replica.standing, []
    if standing.error is not None:
        found.append(f"{standing.error.code} {standing.error.message}")
    if replica.behind:
        found.append(f"{count(replica.behind, 'id')} behind: it holds ids up to {replica.last_id:,} of {committed:,}")
    elif standing.mark < committed and replica.last_id is not None:
        found.append(f"it holds ids up to {replica.last_id:,}, and knows up to {standing.mark:,} that they are committed")
    if standing.error is None and standing.verdict is Verdict.SAME and standing.compared < standing.mark:
        found.append(f"no other replica has got beyond id {standing.compared:,} to compare it with")
    return found


def differing_byte(payloads: Sequence[bytes]) -> int | None:
    """Return the offset of the first byte that differs."""
    if len(set(payloads)) < 2:
        return None
    shortest = min(map(len, payloads))
    pairs = enumerate(zip(*(payload[:shortest] for payload in payloads), strict=True))
    return next((at for at, values in pairs if len(set(values)) > 1), shortest)


def _record_json(record: Record | WaltzError) -> dict[str, Any]:
    if isinstance(record, WaltzError):
        return {"error": record}
    payload = decoded(record.payload)
    return {
        "client": record.request.client, "generation": record.request.generation, "sequence": record.request.sequence,
        "kind": record.header, "size": record.length, "data_crc": f"{record.data_crc:08x}", "crc": f"{record.crc:08x}",
        "payload_encoding": payload.encoding, "payload": payload.value, "error": None,
    }  # fmt: skip


# -- what differs ------------------------------------------------------------------------------------------------------


class Verdict(enum.Enum):
    SAME = "same"
    """Equal to the other replicas, up to the last compared id."""
    DIFFERENT = "different"
    UNKNOWN = "unknown"
    """The replica did not answer, or there was no other one to compare it with."""


@dataclass(frozen=True)
class Question:
    replicas: tuple[str, ...]
    first_id: int
    last_id: int


Answers: TypeAlias = Mapping[str, Digest | WaltzError]
Asking: TypeAlias = Generator[Question, Answers, "_Level"]


@dataclass(kw_only=True)
class Standing:
    """State of the comparison of one replica."""

    mark: int
    """Last id for which the replica can be asked."""
    compared: int = -1
    """Last id up to which the replica equals the replicas that it was compared with."""
    verdict: Verdict = Verdict.UNKNOWN
    difference: tuple[int, int] | None = None
    """First differing id, twice; or the range that holds it, if a replica stopped answering before the id was found."""
    error: WaltzError | None = None


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One replica in the result."""

    storage: str
    role: Membership | None
    standing: Standing
    last_id: int | None
    """Last id of the replica, committed or not; None if unknown."""
    behind: int | None
    """Number of committed ids that are missing; None if unknown."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    partition: int
    committed: int
    """Last committed id, as reported by the owner, or else by the replicas."""
    first_id: int
    """First id that was compared: the highest trim floor of the replicas."""
    replicas: tuple[Compared, ...]
    differing: Mapping[int, Mapping[str, Record | WaltzError]]
    """Id of a first difference → the record on each replica, or the error of reading it."""
    exchanges: int
    hashed_bytes: int

    @property
    def exit_code(self) -> int:
        verdicts = [replica.standing.verdict for replica in self.replicas]
        if Verdict.DIFFERENT in verdicts:
            return EXIT_FINDINGS
        return EXIT_PARTIAL if Verdict.UNKNOWN in verdicts or len(verdicts) < 2 else EXIT_OK


@dataclass(frozen=True)
class _Level:
    """Digests of one range on several replicas."""

    last_id: int
    hashes: dict[str, bytes]
    errors: dict[str, WaltzError]


def comparison(marks: Mapping[str, int], begin: int = 0) -> Generator[Question, Answers, dict[str, Standing]]:
    """Compare replicas. `marks` is, for each, the last id for which it can be asked; -1 if it is empty. `begin` is the
    first id that none of them has trimmed. A replica that ends further below it stays unknown."""
    standings = {name: Standing(mark=mark) for name, mark in sorted(marks.items())}
    asked = [name for name, standing in standings.items() if standing.mark >= begin - 1]
    at = begin
    while True:
        for name in [name for name in asked if standings[name].mark < at]:
            standings[name].verdict = Verdict.SAME
            asked.remove(name)
        if len(asked) < 2:
            break
        found = yield from _level(asked, at, min(standings[name].mark for name in asked))
        for name, error in found.errors.items():
            standings[name].error = error
            asked.remove(name)
        if len(asked) < 2:
            break
        agreed = _agreed(found.hashes)
        is_majority = 2 * len(agreed) > len(asked)
        for name in [name for name in asked if name not in agreed]:
            difference, trouble = yield from _first_difference((agreed[0], name), at, found.last_id)
            standings[name].error = trouble
            _differs(standings[name], difference)
            asked.remove(name)
            if not is_majority:  # without a majority no one can tell which one is right
                for other in agreed:
                    before = standings[other].difference
                    _differs(standings[other], difference if before is None else min(before, difference))
        if not is_majority:
            asked = []
            break
        for name in agreed:
            standings[name].compared = found.last_id
        at = found.last_id + 1
    for name in asked:  # no other replica is left to compare it with
        standings[name].verdict = Verdict.SAME if standings[name].compared >= 0 else Verdict.UNKNOWN
    return standings


def _differs(standing: Standing, difference: tuple[int, int]) -> None:
    standing.verdict, standing.difference, standing.compared = Verdict.DIFFERENT, difference, difference[0] - 1


def _agreed(hashes: Mapping[str, bytes]) -> list[str]:
    """Return the largest group of replicas with equal digests; of groups of the same size the first by name."""
    groups: dict[bytes, list[str]] = {}
    for name, hash_ in sorted(hashes.items()):
        groups.setdefault(hash_, []).append(name)
    return max(groups.values(), key=len)


def _level(replicas: Sequence[str], first_id: int, last_id: int) -> Asking:
    """Return digests of the longest range from `first_id` on that every answering replica has hashed."""
    digests: dict[str, Digest] = {}
    errors: dict[str, WaltzError] = {}
    asked = tuple(replicas)
    while asked:
        answers = yield Question(asked, first_id, last_id)
        for name in asked:
            answer = answers[name]
            if isinstance(answer, WaltzError):
                errors[name] = answer
                digests.pop(name, None)
            else:
                assert first_id <= answer.last_id <= last_id
                digests[name] = answer
        last_id = min((digest.last_id for digest in digests.values()), default=last_id)
        asked = tuple(name for name, digest in digests.items() if digest.last_id > last_id)
    return _Level(last_id, {name: digest.hash for name, digest in digests.items()}, errors)


def _first_difference(
    pair: tuple[str, str], first_id: int, last_id: int
) -> Generator[Question, Answers, tuple[tuple[int, int], WaltzError | None]]:
    """Return the first differing id of two replicas that differ in this range and are equal in front of it."""
    while first_id < last_id:
        found = yield from _level(pair, first_id, (first_id + last_id) // 2)
        if found.errors:
            return (first_id, last_id), found.errors.get(pair[1], next(iter(found.errors.values())))
        if len(set(found.hashes.values())) == 1:
            first_id = found.last_id + 1
        else:
            last_id = found.last_id
    return (first_id, last_id), None

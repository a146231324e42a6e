"""Values of Waltz as protobuf messages and back: what storages say of themselves, findings, errors."""

from __future__ import annotations

from uuid import UUID

from google.protobuf.message import DecodeError

from waltzd import wire_pb2 as wire
from waltzd.errors import BadFrame, CannotConnect, WaltzError, tree
from waltzd.finding import Code, Finding
from waltzd.histogram import Histogram
from waltzd.process import Event, Events, Vitals
from waltzd.replica import PartitionDescription, ReplicaStatus, SetAside, Statistics, StorageDescription
from waltzd.wire_pb2 import ErrorDetail
from waltzd.wire_pb2 import Finding as FindingMessage
from waltzd.wire_pb2 import ReplicaStatus as StatusMessage

_ERRORS = tree()


def uuid_of(raw: bytes, what: str) -> UUID:
    if len(raw) != 16:
        raise BadFrame(f"{what} has 16 bytes; this one has {len(raw)}")
    return UUID(bytes=raw)


def finding_message(finding: Finding) -> FindingMessage:
    return FindingMessage(
        code=str(finding.code),
        path=finding.path,
        detail=finding.detail,
        partition=finding.partition,
        first_byte=finding.first_byte,
        last_byte=finding.last_byte,
        first_id=finding.first_id,
        last_id=finding.last_id,
    )


def finding_of(message: FindingMessage) -> Finding:
    return Finding(
        code=_code_of(message.code),
        path=message.path,
        detail=message.detail,
        partition=message.partition if message.HasField("partition") else None,
        first_byte=message.first_byte if message.HasField("first_byte") else None,
        last_byte=message.last_byte if message.HasField("last_byte") else None,
        first_id=message.first_id if message.HasField("first_id") else None,
        last_id=message.last_id if message.HasField("last_id") else None,
    )


def _code_of(text: str) -> Code:
    try:
        return Code(text)
    except ValueError:
        raise BadFrame(f"a finding has the code {text[:40]!r}, which this version does not know") from None


def status_message(status: ReplicaStatus) -> StatusMessage:
    return StatusMessage(
        partition=status.partition,
        incarnation=status.incarnation.bytes,
        promised_session=status.promised_session,
        session=status.session,
        low_mark=status.low_mark,
        local_low_mark=status.local_low_mark,
        committed=status.committed,
        last_id=status.last_id,
        available=status.is_available,
        full=status.is_full,
        segments=status.segments,
        findings=[finding_message(finding) for finding in status.findings],
        damaged_segments=status.damaged_segments,
        contact=status.contact,
    )


def status_of(message: StatusMessage) -> ReplicaStatus:
    return ReplicaStatus(
        partition=message.partition,
        incarnation=uuid_of(message.incarnation, "an incarnation"),
        promised_session=message.promised_session,
        session=message.session,
        low_mark=message.low_mark,
        local_low_mark=message.local_low_mark,
        committed=message.committed,
        last_id=message.last_id,
        is_available=message.available,
        is_full=message.full,
        segments=message.segments,
        findings=tuple(finding_of(finding) for finding in message.findings),
        damaged_segments=tuple(message.damaged_segments),
        contact=message.contact,
    )


def detail_of(error: WaltzError) -> ErrorDetail:
    return ErrorDetail(
        code=error.code,
        message=error.message,
        not_done=error.detail_not_done,
        next_step=error.detail_next_step,
        facts=error.facts,
    )


def packed_error(error: WaltzError) -> bytes:
    return detail_of(error).SerializeToString()


def unpacked_error(raw: bytes) -> WaltzError:
    try:
        return error_of_detail(ErrorDetail.FromString(raw))
    except DecodeError:
        return CannotConnect("the other side gave a reason that cannot be read")


def error_of_detail(detail: ErrorDetail) -> WaltzError:
    """The same class as on the other side; an unknown code (a newer Waltz) keeps its text, also when it is passed on."""
    cls = _ERRORS.get(detail.code)
    is_told = cls is not None or detail.code == WaltzError.code
    message = detail.message if is_told else f"{detail.code}, which this version does not know: {detail.message}"
    error = (cls or WaltzError)(message, not_done=detail.not_done, next_step=detail.next_step)
    error.facts.update(detail.facts)
    return error


def description_message(description: StorageDescription) -> wire.StorageDescription:
    return wire.StorageDescription(
        cluster_key=description.cluster_key.bytes,
        partitions=description.partitions,
        directory=description.directory,
        version=description.version,
        free_bytes=description.free_bytes,
        uptime_ms=description.uptime_ms,
        draining=description.is_draining,
        assigned=[
            wire.PartitionDescription(
                partition=found.partition,
                status=None if found.status is None else status_message(found.status),
                refused=None if found.refused is None else detail_of(found.refused),
                story=found.story,
                queued_bytes=found.queued_bytes,
                disk_bytes=found.disk_bytes,
            )
            for found in description.assigned
        ],
        statistics=_statistics_message(description.statistics),
        vitals=None if description.vitals is None else vitals_message(description.vitals),
        instance=b"" if description.instance is None else description.instance.bytes,
        free_bytes_min=description.free_bytes_min,
        name=description.name,
        set_aside=[wire.SetAside(name=found.name, bytes=found.bytes) for found in description.set_aside],
    )


def description_of(message: wire.StorageDescription) -> StorageDescription:
    return StorageDescription(
        cluster_key=uuid_of(message.cluster_key, "a cluster key"),
        partitions=message.partitions,
        directory=message.directory,
        version=message.version,
        free_bytes=message.free_bytes,
        uptime_ms=message.uptime_ms,
        is_draining=message.draining,
        assigned=tuple(
            PartitionDescription(
                partition=found.partition,
                status=status_of(found.status) if found.HasField("status") else None,
                refused=error_of_detail(found.refused) if found.HasField("refused") else None,
                story=found.story,
                queued_bytes=found.queued_bytes,
                disk_bytes=found.disk_bytes,
            )
            for found in message.assigned
        ),
        statistics=_statistics_of(message.statistics),
        vitals=vitals_of(message.vitals) if message.HasField("vitals") else None,
        instance=uuid_of(message.instance, "an instance") if message.instance else None,
        free_bytes_min=message.free_bytes_min,
        name=message.name,
        set_aside=tuple(SetAside(found.name, found.bytes) for found in message.set_aside),
    )


def _statistics_message(found: Statistics) -> wire.Statistics:
    return wire.Statistics(**{**vars(found), "flush": histogram_message(found.flush)})


def _statistics_of(message: wire.Statistics) -> Statistics:
    fields = {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields}
    return Statistics(**{**fields, "flush": histogram_of(message.flush)})


def histogram_message(found: Histogram) -> wire.Histogram:
    return wire.Histogram(counts=found.encode(), seconds=found.seconds)


def histogram_of(message: wire.Histogram) -> Histogram:
    return Histogram.decode(message.counts, message.seconds)


# -- a daemon of either kind -------------------------------------------------------------------------------------------


def vitals_message(vitals: Vitals) -> wire.Vitals:
    return wire.Vitals(**vars(vitals))


def vitals_of(message: wire.Vitals) -> Vitals:
    return Vitals(
        time_ms=message.time_ms,
        open_files=message.open_files if message.HasField("open_files") else None,
        open_files_max=message.open_files_max,
    )


def events_message(found: Events) -> wire.EventsReply:
    return wire.EventsReply(began_ms=found.began_ms, events=[wire.LogEvent(**vars(event)) for event in found.events])


def events_of(message: wire.EventsReply) -> Events:
    return Events(
        began_ms=message.began_ms,
        events=tuple(
            Event(
                number=event.number,
                time_ms=event.time_ms,
                level=event.level,
                text=event.text,
                code=event.code if event.HasField("code") else None,
            )
            for event in message.events
        ),
    )

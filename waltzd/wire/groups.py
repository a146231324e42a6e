"""Conversion of frames between members of consumer groups and owners to messages and back. Columns are converted by
hand.
"""

from __future__ import annotations

from collections.abc import Sequence

from waltzd.errors.operations import BadFrame
from waltzd.protocol.groups import (
    Ack,
    AckKind,
    AckResult,
    AcksDurable,
    Deliveries,
    DeliveryFrame,
    Dismissed,
    Joined,
    JoinRequest,
    Leave,
    MemberFrame,
    Paused,
)
from waltzd.wire import wire_pb2 as wire
from waltzd.wire.codec import column, detail_of, error_of_detail, fill, taken, to_message, to_value

_STRETCHES = (column("firsts", ">i8", "i8"), column("lasts", ">i8", "i8"))
_DELIVERIES = (
    column("ids", ">i8", "i8"),
    column("attempts", ">i4", "i4"),
    column("headers", ">i4", "i4"),
    column("times", ">i8", "i8"),
    column("lengths", ">u4", "u4"),
    column("data_crcs", ">u4", "u4"),
)


def member_message(frames: Sequence[MemberFrame]) -> wire.MemberFrame:
    message = wire.MemberFrame()
    for frame in frames:
        match frame:
            case JoinRequest():
                message.join.CopyFrom(to_message(wire.JoinRequest, frame))
            case Ack():
                said = message.said.add(
                    number=frame.number, verb=frame.verb, epoch=frame.epoch, tag=frame.tag, reason=frame.reason
                )
                if frame.delay_ms is not None:
                    said.delay_ms = frame.delay_ms
                fill(said, frame, *_STRETCHES)
            case Leave():
                message.leaves = True
    return message


def member_frames(message: wire.MemberFrame) -> list[MemberFrame]:
    frames: list[MemberFrame] = []
    if message.HasField("join"):
        frames.append(to_value(JoinRequest, message.join))
    frames += map(_said, message.said)
    if message.leaves:
        frames.append(Leave())
    if not frames:
        raise BadFrame("a message is empty")
    return frames


def _said(message: wire.Said) -> Ack:
    try:
        verb = AckKind(message.verb)
    except ValueError:
        raise BadFrame(f"an acknowledgement has the unknown kind {message.verb}") from None
    return Ack(
        number=message.number,
        verb=verb,
        epoch=message.epoch,
        tag=message.tag,
        delay_ms=message.delay_ms if message.HasField("delay_ms") else None,
        reason=message.reason,
        **taken(message, *_STRETCHES),
    )


def delivery_message(frames: Sequence[DeliveryFrame]) -> wire.DeliveryFrame:
    """Pack frames of an owner: at most one of each kind, except deliveries and results."""
    message = wire.DeliveryFrame()
    for frame in frames:
        match frame:
            case Joined():
                message.joined.CopyFrom(to_message(wire.Joined, frame))
            case Deliveries():
                found = message.deliveries.add(epoch=frame.epoch, tag=frame.tag)
                fill(found, frame, *_DELIVERIES)
                found.payloads = frame.payloads if isinstance(frame.payloads, bytes) else bytes(frame.payloads)
            case AckResult():
                message.answers.append(to_message(wire.Answer, frame))
            case AcksDurable():
                message.kept = frame.number
            case Paused():
                message.paused = frame.reason
            case Dismissed():
                message.dismissed.CopyFrom(detail_of(frame.error))
    return message


def delivery_frames(message: wire.DeliveryFrame) -> list[DeliveryFrame]:
    frames: list[DeliveryFrame] = []
    if message.HasField("joined"):
        frames.append(to_value(Joined, message.joined))
    frames += map(_deliveries, message.deliveries)
    frames += (to_value(AckResult, answer) for answer in message.answers)
    if message.HasField("kept"):
        frames.append(AcksDurable(message.kept))
    if message.HasField("paused"):
        frames.append(Paused(message.paused))
    if message.HasField("dismissed"):
        frames.append(Dismissed(error_of_detail(message.dismissed)))
    return frames


def _deliveries(message: wire.Deliveries) -> Deliveries:
    rows, given = taken(message, *_DELIVERIES), len(message.payloads)
    told = int(rows["lengths"].sum(dtype="i8"))
    if told != given:
        raise BadFrame(f"a frame of deliveries announces {told} bytes of payloads and has {given}")
    return Deliveries(epoch=message.epoch, tag=message.tag, payloads=message.payloads, **rows)

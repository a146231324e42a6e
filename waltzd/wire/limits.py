"""Limits on the size of a message, checked before it is parsed.

A parsed message takes about a hundred bytes for each message nested in it, and two bytes on the wire are enough for
one. So the length and the number of fields of a request are checked while it is still bytes. The receiver checks the
values of the fields.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias, TypeVar

from google.protobuf.message import DecodeError, Message

from waltzd.disk.seam import Buffer
from waltzd.errors import TooLarge, WaltzError
from waltzd.errors.operations import BadFrame
from waltzd.wire import wire_pb2 as wire

M = TypeVar("M", bound=Message)
Parse: TypeAlias = Callable[[bytes], M]
REQUEST_BYTES_MAX = 256 << 10
"""Largest size of a message without records: one that names each partition of the largest cluster."""
CLIENT_FIELDS_MAX = 4096
"""Largest number of fields in one message of a mount, where each batch is a field. A client sends at most about 2000
small ones together."""
MEMBER_FIELDS_MAX = 256
"""Largest number of fields in one message of a member. A client sends at most 32 acknowledgements together."""
MEMBER_BYTES_MAX = MEMBER_FIELDS_MAX << 16
"""Largest size of one message of a member: an acknowledgement with 4096 ranges takes 64 KiB."""
_FIELDS_MAX = {wire.ClientFrame: CLIENT_FIELDS_MAX, wire.MemberFrame: MEMBER_FIELDS_MAX}
_BYTES_MAX = {wire.ClientFrame: None, wire.MemberFrame: MEMBER_BYTES_MAX}
_VARINT_BYTES_MAX = 10


def check_size(kind: type[Message], raw: Buffer) -> None:
    """Raise `TooLarge` or `BadFrame` if a message of this type is too long or has too many fields."""
    bytes_max = _BYTES_MAX.get(kind, REQUEST_BYTES_MAX)
    if bytes_max is not None and len(raw) > bytes_max:
        raise TooLarge(
            f"a message {kind.DESCRIPTOR.name} has {len(raw)} bytes; {bytes_max} are allowed",
            next_step="say less in one message",
        )
    fields_max = _FIELDS_MAX.get(kind)
    if fields_max is not None and _has_more_fields(raw, fields_max):
        raise BadFrame(f"a message {kind.DESCRIPTOR.name} has more than {fields_max} fields")


def bounded(kind: type[M], parse: Parse[M]) -> Callable[[bytes], M | WaltzError]:
    """Return a parser that returns an error instead of a message that is too large. Bytes that are no message are
    parsed as an empty one, which every call with a cluster key rejects in one line. gRPC would log a traceback for
    each, and strangers could fill the disk."""

    def read(raw: bytes) -> M | WaltzError:
        try:
            check_size(kind, raw)
            return parse(raw)
        except DecodeError:
            return parse(b"")
        except WaltzError as error:
            return error

    return read


def _has_more_fields(raw: Buffer, most: int) -> bool:
    """Return whether a message has more than `most` fields, nested ones not counted. Bytes that are no message are left
    to the parser."""
    at, end = 0, len(raw)
    for _ in range(most + 1):
        if at >= end:
            return False
        tag, at = _varint(raw, at)
        match tag & 7:
            case 0:
                _, at = _varint(raw, at)
            case 1:
                at += 8
            case 2:
                size, at = _varint(raw, at)
                at += size
            case 5:
                at += 4
            case _:
                return False
    return at < end


def _varint(raw: Buffer, at: int) -> tuple[int, int]:
    """Return the number at an offset and the offset behind it. Bytes beyond the end of the message count as zeros."""
    value = 0
    for shift in range(_VARINT_BYTES_MAX):
        byte = raw[at + shift] if at + shift < len(raw) else 0
        value |= (byte & 0x7F) << 7 * shift
        if byte < 0x80:
            return value, at + shift + 1
    return value, at + _VARINT_BYTES_MAX

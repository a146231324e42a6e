"""Records of one mount in the audit log, whatever transport carries it: its begin, its end and the cause of the end.

The transport passes each frame here; only the first frame of a client, and the answer to it, are examined.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from waltzd.protocol.audit import ANONYMOUS, Auditor, AuditRecord
from waltzd.protocol.batches import ClientFrame, Mounted, MountRequest, Refused, ServerFrame

MOUNT_CALL = "Log/Mount"


class MountAudit:
    def __init__(self, auditor: Auditor, *, who: str, peer: str) -> None:
        self._auditor = auditor
        self._deed = AuditRecord(who=who or ANONYMOUS, peer=peer, what=MOUNT_CALL)
        self._is_asked = self._is_mounted = False
        self._code: str | None = None

    def note_received(self, frames: Sequence[ClientFrame]) -> None:
        """Examine frames from the client."""
        if self._is_asked:
            return
        self._is_asked = True
        for frame in frames:
            if isinstance(frame, MountRequest):
                about = f"client={frame.client} feed={frame.feed.name.lower()}"
                self._deed = replace(self._deed, partitions=str(frame.partition), about=about)

    def note_sent(self, frames: Sequence[ServerFrame]) -> None:
        """Examine frames to the client."""
        if not self._is_mounted and isinstance(frames[0], Mounted):
            self._is_mounted = True
            self._auditor.note(self._deed)
        if isinstance(frames[-1], Refused):
            self._code = frames[-1].error.code

    def note_end(self) -> None:
        what = f"{MOUNT_CALL}/end" if self._is_mounted else MOUNT_CALL
        if self._is_mounted or self._code is not None:
            self._auditor.note(replace(self._deed, what=what, code=self._code))

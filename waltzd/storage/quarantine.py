"""What is wrong with one replica: which ids may not be served because their bytes are damaged, and how that is said.

Two kinds. `findings` of files: bytes that are not what was written, or a segment that is missing between others. And the
end: `short` says that the log is shorter than this replica once had it on disk.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from waltzd.errors import PartitionDamaged
from waltzd.finding import Finding


class Quarantine:
    """Findings in the order of their ids; those without ids (bytes too many) first. Truthy when there are any."""

    def __init__(self, partition: int, in_files: Iterable[Finding], short: Finding | None) -> None:
        self._partition = partition
        self._in_files = tuple(in_files)
        self.short = short

    @property
    def findings(self) -> tuple[Finding, ...]:
        found = (*self._in_files, self.short) if self.short else self._in_files
        return tuple(sorted(found, key=lambda f: -1 if f.first_id is None else f.first_id))

    def __bool__(self) -> bool:
        return bool(self._in_files) or self.short is not None

    @property
    def is_only_short(self) -> bool:
        """What is here is sound, and the end is missing: whatever is appended brings it nearer."""
        return self.short is not None and not self._in_files

    def error(self, findings: Sequence[Finding] = ()) -> PartitionDamaged:
        chosen = findings or self.findings
        if not chosen:
            return PartitionDamaged(f"partition {self._partition} is damaged: its last segment cannot be read")
        first = chosen[0]
        return PartitionDamaged(
            f"partition {self._partition} is damaged: {first.sentence()}", first_id=first.first_id, last_id=first.last_id
        )

    def sound_part(self, first_id: int, last_id: int) -> int:
        """The last id of the range that can be read from `first_id` on; refused when that one is damaged itself."""
        for finding in self.findings:
            if finding.first_id is None or finding.last_id is None or finding.last_id < first_id:
                continue
            if finding.first_id <= first_id:
                raise self.error([finding])
            last_id = min(last_id, finding.first_id - 1)
        return last_id

    def last_sound(self, first_id: int, last_id: int) -> int:
        """The highest id of the range that can be served, or the one in front of the range."""
        while last_id >= first_id:
            starts = [
                finding.first_id
                for finding in self._in_files
                if finding.first_id is not None
                and finding.last_id is not None
                and finding.first_id <= last_id <= finding.last_id
            ]
            if not starts:
                return last_id
            last_id = min(starts) - 1
        return first_id - 1

    def holds(self, path: str) -> bool:
        """Whether something is wrong with this file."""
        return any(finding.path == path for finding in self._in_files)

    def check_file(self, path: str) -> None:
        here = [finding for finding in self._in_files if finding.path == path]
        if here:
            raise self.error(here)

    def check_up_to(self, mark: int) -> None:
        """Refused when a record at or below the mark is damaged."""
        below = [finding for finding in self.findings if finding.first_id is not None and finding.first_id <= mark]
        if below:
            raise self.error(below)

    def replace(self, path: str, found: Sequence[Finding]) -> None:
        """What was found in a file now takes the place of what was known of it."""
        self._in_files = (*(finding for finding in self._in_files if finding.path != path), *found)

    def heal(self) -> None:
        self._in_files, self.short = (), None

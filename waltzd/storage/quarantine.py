"""Which ids of one replica may not be served because their bytes are damaged, and how that is said."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from waltzd.errors import PartitionDamaged
from waltzd.finding import Finding


class Quarantine:
    """Findings in the order of their ids; those without ids (bytes too many) first. Truthy when there are any."""

    def __init__(self, partition: int, findings: Iterable[Finding]) -> None:
        self._partition = partition
        self.findings: tuple[Finding, ...] = ()
        self._set(findings)

    def _set(self, findings: Iterable[Finding]) -> None:
        self.findings = tuple(sorted(findings, key=lambda f: -1 if f.first_id is None else f.first_id))

    def __bool__(self) -> bool:
        return bool(self.findings)

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

    def check_file(self, path: str) -> None:
        here = [finding for finding in self.findings if finding.path == path]
        if here:
            raise self.error(here)

    def check_up_to(self, mark: int) -> None:
        """Refused when a record at or below the mark is damaged."""
        below = [finding for finding in self.findings if finding.first_id is not None and finding.first_id <= mark]
        if below:
            raise self.error(below)

    def replace(self, path: str, found: Sequence[Finding]) -> None:
        """What was found in a file now takes the place of what was known of it."""
        self._set([finding for finding in self.findings if finding.path != path] + list(found))

    def heal(self) -> None:
        self.findings = ()

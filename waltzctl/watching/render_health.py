"""How probes look."""

from __future__ import annotations

from typing import Any

from waltzctl.numbers import spell
from waltzctl.render import ROWS_MAX, console, count, put_json, table
from waltzctl.watching.probe import Probe, Probing
from waltzctl.watching.render_status import paragraph, put_next
from waltzd.errors import WaltzError


def probing(
    found: Probing, contact_ms: float | None, contact_error: WaltzError | None, output: str, *, is_writing: bool
) -> None:
    if output == "json":
        put_json(_json(found, contact_ms, contact_error, is_writing=is_writing))
        return
    out = console()
    failed = [probe for probe in found.probes if probe.error is not None]
    total = len(found.probes)
    did = "committed a probe and gave it back" if is_writing else "answered"
    if not failed and contact_error is None:
        out.print(f"healthy: {count(total, 'partition')} {did}", style="bold green", soft_wrap=True)
    else:
        out.print(
            f"unhealthy: {total - len(failed)} of {count(total, 'partition')} {did}", style="bold red", soft_wrap=True
        )
    if contact_error is not None:
        paragraph(out, f"- ZooKeeper does not answer: {contact_error.code} {contact_error.message}", "red")
    told: dict[str, list[Probe]] = {}
    for probe in failed:
        assert probe.error is not None
        told.setdefault(f"{probe.stage}: {probe.error.code} {probe.error.message}", []).append(probe)
    for why, probes in told.items():
        error = probes[0].error
        paragraph(out, f"- {spell(probe.partition for probe in probes)}: {why}", "red")
        if error is not None and error.detail_next_step:
            put_next(out, error.detail_next_step)
    shown = failed[:ROWS_MAX] if total > ROWS_MAX else list(found.probes)
    rows: list[tuple[str, ...]]
    if is_writing:
        rows = [
            (str(probe.partition), probe.owner or "nobody", _ms(probe.mount_ms), _ms(probe.commit_ms), _ms(probe.read_ms),
             "" if probe.id is None else f"{probe.id:,}", "ok" if probe.error is None else f"failed: {probe.stage}")
            for probe in shown
        ]  # fmt: skip
        names: tuple[str, ...] = ("partition", "owner", "mount ms", "commit ms", "read ms", "id", "result")
        table(out, names, rows, right=names[:1] + names[2:6])
    else:
        rows = [
            (str(probe.partition), probe.owner or "nobody", _ms(probe.mount_ms),
             "" if probe.id is None else f"{probe.id:,}", "ok" if probe.error is None else "failed")
            for probe in shown
        ]  # fmt: skip
        names = ("partition", "owner", "answered ms", "high-water mark", "result")
        table(out, names, rows, right=("partition", "answered ms", "high-water mark"))
    commits = sorted(probe.commit_ms for probe in found.probes if probe.commit_ms is not None)
    parts = [f"ZooKeeper {_ms(contact_ms) or '-'} ms", f"locate {_ms(found.locate_ms) or '-'} ms"]
    if commits:
        parts.append(f"commit {commits[len(commits) // 2]:.1f} ms in the middle, {commits[-1]:.1f} ms at most")
    out.print(", ".join(parts), soft_wrap=True)


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:,.1f}"


def _json(
    found: Probing, contact_ms: float | None, contact_error: WaltzError | None, *, is_writing: bool
) -> dict[str, Any]:
    return {
        "is_healthy": found.is_well and contact_error is None,
        "is_writing": is_writing,
        "coordinator_milliseconds": _rounded(contact_ms),
        "locate_milliseconds": _rounded(found.locate_ms),
        "coordinator_error": _error(contact_error),
        "partitions": [_probe_json(probe) for probe in found.probes],
    }


def _probe_json(probe: Probe) -> dict[str, Any]:
    return {
        "partition": probe.partition,
        "owner": probe.owner,
        "mount_milliseconds": _rounded(probe.mount_ms),
        "commit_milliseconds": _rounded(probe.commit_ms),
        "read_milliseconds": _rounded(probe.read_ms),
        "id": probe.id,
        "failed_stage": probe.stage,
        "error": _error(probe.error),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def _error(error: WaltzError | None) -> dict[str, str] | None:
    if error is None:
        return None
    return {"code": error.code, "message": error.message, "next_step": error.detail_next_step}

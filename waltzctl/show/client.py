"""Output about applications: connected instances, usage of each name, and its rights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from waltzctl.show.forms import Column, Columns, Line, Listing, Part, Table, attributes, objects, warnings
from waltzctl.show.terminal import duration, size
from waltzctl.snapshot.client_inventory import ApplicationInstance, ClientInventory, ServerUsage
from waltzctl.snapshot.cluster_snapshot import silent_servers
from waltzd.cluster.assignment import format_numbers
from waltzd.cluster.documents import PolicyDocument
from waltzd.protocol.channels import NO_CHANNELS
from waltzd.protocol.policy import Grant, Policy, Prefix, Verb, everything

if TYPE_CHECKING:
    from waltzd.cluster.documents import ClientMeta


def _state(one: ApplicationInstance) -> str:
    if one.state == "gone":
        return one.state
    return ", ".join([one.state, *["slowed"] * one.is_slowed, *["waits for the archive"] * bool(one.waiting)])


INSTANCES: Columns[ApplicationInstance] = (
    *attributes("name instance"),
    Column("state", _state, json=""),
    *(Column("", json=name) for name in ("state", "is_slowed")),
    Column("since", "age_ms", cell=duration, json="age_milliseconds"),
    Column("heard", "quiet_ms", cell=duration, json="quiet_milliseconds"),
    Column("partitions", cell=format_numbers),
    *attributes("appended fed"),
    Column("address", "peer"),
    *attributes("version waiting role", is_wide=True),
    Column("epoch", is_wide=True, cell=lambda epoch: str(epoch or "")),
    Column("servers", is_wide=True),
    *attributes("appended_bytes fed_bytes", is_wide=True, cell=size),
)
USES: Columns[ServerUsage] = (
    Column("server"),
    Column("mounts", "use.mounts"),
    Column("in flight", "use.inflight_bytes", cell=size, json="inflight_bytes"),
    Column("slowed", "use.slowed_ms", cell=duration, json="slowed_milliseconds"),
    Column("last", "use.slowed_ago_ms", json="slowed_ago_milliseconds", cell=lambda ago: f"{duration(ago)} ago"),
    Column("refused mounts", "use.refused_mounts"),
)


def clients(found: ClientInventory, *, with_gone: bool) -> Listing[ApplicationInstance]:
    return Listing(
        kind="clients",
        columns=INSTANCES,
        rows=[one for one in found.instances if with_gone or one.state != "gone"],
        nothing="No application is connected.",
        notes=warnings(silent_servers(found.silent)),
        more={"silent_servers": dict(found.silent)},
    )


def client(name: str, found: ClientInventory, kept: ClientMeta | None) -> Listing[ApplicationInstance]:
    rows = [one for one in found.instances if one.name == name]
    uses = [one for one in found.uses if one.use.name == name]
    seen = {} if kept is None else {"first_seen": _moment(kept.first_seen), "last_seen": _moment(kept.last_seen)}
    epoch = 0 if kept is None else kept.epoch
    page: list[Part] = [Line(f"application {name}", "bold")]
    if seen:
        moments = f"first seen {seen['first_seen']}, last seen {seen['last_seen']}"
        page.append(moments + (f", newest epoch {epoch}" if epoch else ""))
    page.append(Table(INSTANCES, rows) if rows else "No instance of it is connected, or was lately.")
    page += [Table(USES, uses), *warnings(silent_servers(found.silent))]
    content = {
        "name": name,
        "first_seen": seen.get("first_seen"),
        "last_seen": seen.get("last_seen"),
        "epoch": epoch,
        "instances": objects(INSTANCES, rows),
        "uses": objects(USES, uses),
        "silent_servers": dict(found.silent),
    }
    return Listing(kind="instances", columns=INSTANCES, rows=rows, page=page, content=content)


def _moment(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


# -- what a policy lets them do ----------------------------------------------------------------------------------------

NO_POLICY = "There is no policy: every application may do everything."


def grants(found: PolicyDocument | None) -> Listing[Mapping[str, Any]]:
    """Return the grants; their YAML or JSON is a file for `waltzctl policy set`."""
    columns: Columns[Mapping[str, Any]] = (
        Column("names"),
        Column("may"),
        Column("partitions", lambda grant: grant["partitions"] or "all"),
        Column("locks", lambda grant: "all" if grant["lock_prefixes"] is None else grant["lock_prefixes"]),
        Column("quotas", lambda grant: _quotas(grant["quotas"])),
        Column("one instance"),
    )
    rows = [] if found is None else [{**asdict(grant), "may": [str(verb) for verb in grant.may]} for grant in found.grants]
    nothing = NO_POLICY if found is None else "The policy has no grants: no application may do anything."
    return Listing(kind="grants", columns=columns, rows=rows, nothing=nothing, more={"exists": found is not None})


def _quotas(quotas: Mapping[str, int | None] | None) -> list[str]:
    return [f"{name}={amount:,}" for name, amount in (quotas or {}).items() if amount is not None]


def describe_grant(grant: Grant) -> str:
    quotas = _quotas(None if grant.quotas is None else asdict(grant.quotas))
    parts = [
        f"{', '.join(grant.names)} may {', '.join(grant.may)}",
        "in all partitions" if grant.partitions is None else f"in partitions {grant.partitions}",
        *([f"and work in groups {', '.join(grant.groups)}"] if grant.groups else []),
        *([] if grant.lock_prefixes is None else [f"with locks {', '.join(grant.lock_prefixes) or 'of no kind'}"]),
        *([f"at most {', '.join(quotas)}"] if quotas else []),
        *(["one instance at a time"] if grant.one_instance else []),
    ]
    return ", ".join(parts)


def rights(name: str, policy: Policy | None, partitions: Sequence[int]) -> Listing[Mapping[str, Any]]:
    """Return the rights of a name in these partitions, and the grants that allow them."""
    found = everything(name) if policy is None else policy.rights_of(name)
    numbered = [] if policy is None else [(at, grant) for at, grant in enumerate(policy.grants, 1) if grant in found.grants]

    def row(verb: Verb) -> Mapping[str, Any]:
        allowed = [number for number in partitions if found.may(verb, number)]
        verbs = (verb, Verb.READ) if verb is Verb.SUBSCRIBE else (verb,)
        by = [(at, grant) for at, grant in numbered if any(one in grant.may for one in verbs)]
        by = [(at, grant) for at, grant in by if any(_speaks_of(grant, verb, number, policy) for number in partitions)]
        return {
            "name": name,
            "verb": str(verb),
            "partitions": allowed,
            "allowed": len(allowed) == len(partitions) > 0,
            "grants": [at for at, _ in by],
            "because": [describe_grant(grant) for _, grant in by],
        }

    return Listing(
        kind="rights",
        columns=(
            Column("verb"),
            Column("allowed", lambda row: _where(row["partitions"], partitions), json=""),
            Column("grants"),
            Column("because", cell="; ".join),
        ),
        rows=[row(verb) for verb in Verb],
        more={
            "exists": policy is not None,
            "locks": _locks(policy, found.grants),
            "quotas": {name: amount for name, amount in asdict(found.quotas).items() if amount is not None},
            "one_instance": found.one_instance,
        },
    )


def _where(allowed: Sequence[int], asked: Sequence[int]) -> str:
    if not allowed:
        return "no"
    return "yes" if len(allowed) == len(asked) else f"in {format_numbers(allowed)}"


def _speaks_of(grant: Grant, verb: Verb, partition: int, policy: Policy | None) -> bool:
    channels = NO_CHANNELS if policy is None else policy.channels
    return Policy([grant], channels).rights_of(grant.names[0].removesuffix("*") or "x").may(verb, partition)


def _locks(policy: Policy | None, found: Sequence[Grant]) -> list[Prefix] | None:
    """Describe lock prefixes; None stands for all locks."""
    appending = [grant.lock_prefixes for grant in found if Verb.APPEND in grant.may]
    if policy is None or None in appending:
        return None
    return sorted({prefix for prefixes in appending for prefix in prefixes or ()})

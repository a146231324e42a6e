"""How grants look, and what they come to for a name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from waltzctl.show.forms import Column, Columns, Listing
from waltzd.cluster.assignment import spell_numbers
from waltzd.cluster.documents import PolicyDocument
from waltzd.protocol.channels import NO_CHANNELS
from waltzd.protocol.policy import Grant, Policy, Prefix, Quotas, Verb, everything

NO_POLICY = "There is no policy: every application may do everything."


def grants(found: PolicyDocument | None) -> Listing[Mapping[str, Any]]:
    """As YAML and as JSON, `waltzctl policy set` takes it again."""
    columns: Columns[Mapping[str, Any]] = (
        Column("names", lambda grant: grant["names"]),
        Column("may", lambda grant: grant["may"]),
        Column("partitions", lambda grant: grant["partitions"] or "all"),
        Column("locks", lambda grant: "all" if grant["lock_prefixes"] is None else grant["lock_prefixes"]),
        Column("quotas", lambda grant: _quotas(grant["quotas"])),
        Column("one instance", lambda grant: grant["one_instance"]),
    )
    rows = [] if found is None else [{**asdict(grant), "may": [str(verb) for verb in grant.may]} for grant in found.grants]
    nothing = NO_POLICY if found is None else "The policy has no grants: no application may do anything."
    return Listing(kind="grants", columns=columns, rows=rows, nothing=nothing, more={"exists": found is not None})


def _quotas(quotas: Mapping[str, int | None] | None) -> list[str]:
    return [f"{name}={amount:,}" for name, amount in (quotas or {}).items() if amount is not None]


def spelled(grant: Grant) -> str:
    """One that is read aloud."""
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
    """What a name may do in these partitions, and by which grants."""
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
            "because": [spelled(grant) for _, grant in by],
        }

    return Listing(
        kind="rights",
        columns=(
            Column("verb"),
            Column("allowed", lambda row: _where(row["partitions"], partitions), json=""),
            Column("grants", lambda row: row["grants"]),
            Column("because", lambda row: row["because"], cell="; ".join),
        ),
        rows=[row(verb) for verb in Verb],
        more={
            "exists": policy is not None,
            "locks": _locks(policy, found.grants),
            "quotas": _told(found.quotas),
            "one_instance": found.one_instance,
        },
    )


def _where(allowed: Sequence[int], asked: Sequence[int]) -> str:
    if not allowed:
        return "no"
    return "yes" if len(allowed) == len(asked) else f"in {spell_numbers(allowed)}"


def _speaks_of(grant: Grant, verb: Verb, partition: int, policy: Policy | None) -> bool:
    channels = NO_CHANNELS if policy is None else policy.channels
    return Policy([grant], channels).rights_of(grant.names[0].removesuffix("*") or "x").may(verb, partition)


def _locks(policy: Policy | None, found: Sequence[Grant]) -> list[Prefix] | None:
    """Prefixes; None: all locks."""
    appending = [grant.lock_prefixes for grant in found if Verb.APPEND in grant.may]
    if policy is None or None in appending:
        return None
    return sorted({prefix for prefixes in appending for prefix in prefixes or ()})


def _told(quotas: Quotas) -> dict[str, int]:
    return {name: amount for name, amount in asdict(quotas).items() if amount is not None}

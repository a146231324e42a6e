"""`waltzctl policy`: the access policy of a cluster, in a document in ZooKeeper.

A change is written by compare-and-set, after the operator has seen which rights it takes away. Servers apply the document
within moments.

A policy file is YAML or JSON with grants, and with expectations of what they allow and deny.

Optional fields are filled in here; the rest is parsed by the strict reader of documents in ZooKeeper, so an error names its
place. Only the part of YAML that JSON can express is accepted: no aliases, no tags, and no duplicate keys in a mapping.

    grants:
      - names: [billing-*]
        may: [append, read]
        partitions: 0-3
    expect:
      - {name: billing-1, may: append, partition: 3}
      - {name: eve, may_not: read, partition: 3}
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from typer import Argument, Option

from waltzctl.shell.change import Change, ChangeCommand, ConfirmOptions, nothing_to_do
from waltzctl.shell.cluster_target import ClusterOptions, CommandTarget, check_name, using
from waltzctl.shell.numbers import check_partitions, format_partitions
from waltzctl.shell.options import Misused, Output
from waltzctl.shell.progress import Report
from waltzctl.shell.safety import Danger, Plan
from waltzctl.show.forms import JSON_VERSION, AnyForm, Column, Columns, Listing, put
from waltzctl.snapshot import client_inventory
from waltzctl.snapshot.client_inventory import ApplicationInstance, ClientInventory
from waltzctl.snapshot.cluster_snapshot import silence
from waltzd.cluster.assignment import format_numbers
from waltzd.cluster.cluster import Cluster, channels_of
from waltzd.cluster.documents import ClusterMeta, PolicyDocument, whole_grant
from waltzd.disk.real import translate
from waltzd.errors import EXIT_FINDINGS, EXIT_OK, BadArgument, NoSuchChannel
from waltzd.errors.operations import BadMetadata
from waltzd.protocol.channels import NO_CHANNELS, Channels, Ranges, is_channel, is_ranges, named_in, numbers_of
from waltzd.protocol.document import NESTING_MAX, SCHEMA, Name, decode, with_defaults
from waltzd.protocol.policy import Grant, Policy, Prefix, Rights, Verb, collisions, everything
from waltzd.protocol.role import Role

FILE_BYTES_MAX = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """Expectation of what the grants of a file allow or deny."""

    name: Name
    partition: int
    may: Verb | None = None
    may_not: Verb | None = None

    def unmet(self, policy: Policy) -> str | None:
        rights = policy.rights_of(self.name)
        if self.may is not None and not rights.may(self.may, self.partition):
            return f"{self.name} should be allowed to {self.may} partition {self.partition}, and is not"
        if self.may_not is not None and rights.may(self.may_not, self.partition):
            return f"{self.name} should not be allowed to {self.may_not} partition {self.partition}, and is"
        return None


@dataclass(frozen=True, kw_only=True)
class PolicyFile(PolicyDocument):
    expect: tuple[Expectation, ...] = ()

    def mistake(self) -> tuple[str, str] | None:
        for at, one in enumerate(self.expect):
            if (one.may is None) == (one.may_not is None):
                return f"expect[{at}]", "must say either may or may_not"
        return super().mistake()

    @property
    def document(self) -> PolicyDocument:
        return PolicyDocument(grants=self.grants)

    def check(self, partitions: int, channels: Channels) -> None:
        """Raise for a grant on a partition or channel that the cluster does not have: probably a typing mistake."""
        for at, grant in enumerate(self.grants):
            place = f"grants[{at}].partitions"
            for name in "" if grant.partitions is None else named_in(grant.partitions):
                if name not in channels:
                    raise NoSuchChannel(f"{place}: there is no channel {name}", channel=name)
            for number in () if grant.partitions is None else numbers_of(grant.partitions, channels):
                if number >= partitions:
                    raise BadArgument(f"{place}: there is no partition {number}; the cluster has {partitions}")


class _Loader(yaml.SafeLoader):
    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise BadArgument("it has a YAML alias, which is not accepted", next_step="quote names that begin with *")
        if self.depth > NESTING_MAX:
            raise yaml.composer.ComposerError(
                None,
                None,
                f"values are nested more than {NESTING_MAX} levels deep",
                self.peek_event().start_mark,  # type: ignore[no-untyped-call]
            )
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value]
        for name in names:
            if names.count(name) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"{name!r} comes twice", node.start_mark)
        return super().construct_mapping(node, deep)


def load(path: Path) -> PolicyFile:
    try:
        with path.open("rb") as file:
            raw = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise translate(error, f"reading {path}") from error
    if len(raw) > FILE_BYTES_MAX:
        raise BadArgument(f"{path} is larger than {FILE_BYTES_MAX} bytes: this is no policy")
    return parse(raw, str(path))


def parse(raw: bytes, path: str) -> PolicyFile:
    try:
        found = yaml.load(raw.decode(), _Loader)  # noqa: S506 (it is a SafeLoader)
        text = json.dumps(_filled(found) if isinstance(found, dict) else found)
    except yaml.MarkedYAMLError as error:
        where = f", line {error.problem_mark.line + 1}" if error.problem_mark is not None else ""
        raise BadArgument(f"{path}{where}: {error.problem}") from error
    except (yaml.YAMLError, ValueError, TypeError, OverflowError) as error:
        raise BadArgument(f"{path} is neither YAML nor JSON: {str(error).splitlines()[0]}") from error
    return decode(PolicyFile, text.encode(), path, BadArgument)


def _filled(found: dict[Any, Any]) -> dict[Any, Any]:
    """Parse the content of a policy file. `version` and `exists` are accepted: `policy explain` prints them."""
    filled = {"expect": [], **found, "schema": SCHEMA}
    if filled.pop("version", JSON_VERSION) != JSON_VERSION:
        raise BadArgument("it was written by another version of waltzctl")
    if filled.pop("exists", True) is not True:
        raise BadArgument(
            "it is what `policy explain` wrote where there was no policy",
            next_step="`waltzctl policy set --none` takes one away",
        )
    for name, complete in (("grants", whole_grant), ("expect", partial(with_defaults, Expectation))):
        if isinstance(filled.get(name), list):
            filled[name] = [complete(one) for one in filled[name]]
    return filled


# -- what changes ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Loss:
    """Right that a name loses when one policy replaces another."""

    name: str
    verb: Verb
    partitions: tuple[int, ...]


def losses(old: Policy | None, new: Policy | None, names: Iterable[str], count: int) -> list[Loss]:
    """Return the rights that these names lose, in a cluster with this number of partitions."""
    return [
        Loss(name=name, verb=verb, partitions=lost)
        for name in names
        for verb in Verb
        if (lost := _lost(rights_by(old, name), rights_by(new, name), verb, count))
    ]


def _lost(old: Rights, new: Rights, verb: Verb, count: int) -> tuple[int, ...]:
    return tuple(number for number in range(count) if old.may(verb, number) and not new.may(verb, number))


def rights_by(policy: Policy | None, name: str) -> Rights:
    return everything(name) if policy is None else policy.rights_of(name)


def exact_names(*documents: PolicyDocument | None) -> list[str]:
    """Return the names in grants that are not patterns."""
    found = {
        str(pattern)
        for document in documents
        if document is not None
        for grant in document.grants
        for pattern in grant.names
        if not pattern.endswith("*")
    }
    return sorted(found)


def changed(before: Sequence[Grant], after: Sequence[Grant]) -> tuple[list[Grant], list[Grant]]:
    """Return the grants that are added, and those that are removed; duplicates do not count."""
    return [one for one in after if one not in before], [one for one in before if one not in after]


CUT_MAX = 5
"""Maximum number of instances named in a step of a plan."""
STEPS_MAX = 200
"""Maximum number of steps of a plan, which the history keeps."""


def explain(
    *,
    name: Annotated[str | None, Argument(metavar="[NAME]")] = None,
    partition: Annotated[int | None, Argument(metavar="[PARTITION]", min=0)] = None,
    file: Annotated[
        Path | None,
        Option("--file", dir_okay=False, metavar="FILE", help="Use the policy in this file, not the one in force."),
    ] = None,
    target: CommandTarget,
    output: AnyForm = "table",
) -> int:
    """Show the grants of the policy in force, or, with a NAME, what an application may do in all partitions or in one, and
    which grants allow it. NAME is the name in the certificate of the application, or `anonymous` without certificates. The
    YAML or JSON output without a NAME is a file for `waltzctl policy set`.

    \b
    Examples:
      waltzctl policy explain
      waltzctl policy explain -o yaml
      waltzctl policy explain payments
      waltzctl policy explain payments 3 -o json
    """
    if name is None:
        if file is not None:
            raise Misused("--file needs a NAME.")
        put(grants(using(target, Cluster.policy)[0]), output)
        return EXIT_OK
    check_name(name)

    async def ask(cluster: Cluster) -> tuple[ClusterMeta, PolicyDocument | None, Channels]:
        channels, _ = await channels_of(cluster.coordinator)
        return await cluster.meta(), (await cluster.policy())[0] if file is None else load(file).document, channels

    meta, document, channels = using(target, ask)
    if partition is not None:
        check_partitions([partition], meta.partitions)
    policy = None if document is None else Policy(document.grants, channels)
    put(rights(name, policy, range(meta.partitions) if partition is None else [partition]), output)
    if document is None and output == "table":
        typer.echo(NO_POLICY)
    return EXIT_OK


def set_(
    *,
    file: Annotated[Path | None, Argument(metavar="[FILE]", dir_okay=False)] = None,
    is_check: Annotated[bool, Option("--check", help="Check the file without contacting a cluster.")] = False,
    channels: Annotated[
        tuple[str, ...],
        Option("--channel", metavar="NAME=LIST", help="With --check: a channel of the cluster, as orders=0-3."),
    ] = (),
    is_none: Annotated[bool, Option("--none", help="Delete the policy: every application may then do everything.")] = False,
    confirmation: ConfirmOptions,
    given: ClusterOptions,
    output: Output = "table",
) -> int:
    """Replace the policy of the cluster with the one in a file. The plan shows the grants that are added and removed, which
    names lose which rights, and the connected instances of those names; their mounts end within two seconds. A name without
    a grant may do nothing. Operators may always do everything.

    With --check no cluster is contacted. The command checks that the file is valid, that its grants meet its expectations,
    and that lock prefixes cannot be confused. The exit code is 0 if all checks pass, and 8 if one fails.

    \b
    Examples:
      waltzctl policy set policy.yml --check
      waltzctl policy set policy.yml --check --channel orders=0-3 -o json
      waltzctl policy set policy.yml --dry-run
      waltzctl policy set policy.yml --yes --reason 'billing has its own partitions'
      waltzctl policy set --none --confirm local --reason 'back to trials'
    """
    if is_none is (file is not None) or (is_none and is_check) or (channels and not is_check):
        raise Misused("Name the FILE with the policy, or use --none; --channel needs --check.")
    if is_check and file is not None:
        return _check(file, channels, output)
    command = ChangeCommand(confirmation=confirmation, target=given.target(), output=output)
    return _set(file, command) if file is not None else _remove(command)


def _check(file: Path, channels: Iterable[str], output: str) -> int:
    found = load(file)
    rows = [{"finding": finding} for finding in _findings(found, _typed_channels(channels))]
    put(
        Listing(
            kind="findings",
            columns=(Column("finding"),),
            rows=rows,
            nothing=f"{len(found.grants)} grants, {len(found.expect)} expectations: all is well.",
            more={"grants": len(found.grants), "expectations": len(found.expect)},
        ),
        output,
    )
    return EXIT_FINDINGS if rows else EXIT_OK


def _set(file: Path, command: ChangeCommand) -> int:
    async def prepare(cluster: Cluster) -> Change:
        meta, found = await cluster.meta(), load(file)
        channels, channels_version = await channels_of(cluster.coordinator)
        found.check(meta.partitions, channels)
        if unmet := _unmet(found, channels):
            raise BadArgument(f"{file.name} expects what its grants do not say: {'; '.join(unmet)}")
        version = await cluster.policy_version()  # first, to detect a change after this read
        before, trouble = await _present(cluster)
        if before == found.document:
            return nothing_to_do("policy set", meta.name)
        there = await client_inventory.take_inventory(cluster, command.target.tls)
        is_first = before is None and not trouble
        steps = [*trouble, *_steps(before, found.document, channels, meta.partitions, there, is_first=is_first)]
        plan = Plan(
            verb="policy set",
            subject=meta.name,
            steps=(*steps[:STEPS_MAX], *([f"and {len(steps) - STEPS_MAX} more"] if len(steps) > STEPS_MAX else [])),
            danger=Danger.ASK,
        )

        async def do(cluster: Cluster, _report: Report) -> Mapping[str, Any]:
            await cluster.save_policy(found.document, version, channels=channels_version)
            return {"grants": len(found.grants)}

        return Change(plan=plan, do=do)

    return command.perform(prepare)


def _remove(command: ChangeCommand) -> int:
    async def prepare(cluster: Cluster) -> Change:
        meta, version = await cluster.meta(), await cluster.policy_version()
        before, trouble = await _present(cluster)
        if before is None and not trouble:
            return nothing_to_do("policy set --none", meta.name)
        count = [] if before is None else [f"take its {len(before.grants)} grants away"]
        steps = (*trouble, *count, "from then on every application may do everything")
        plan = Plan(verb="policy set --none", subject=meta.name, steps=steps, danger=Danger.TYPED)

        async def do(cluster: Cluster, _report: Report) -> Mapping[str, Any]:
            await cluster.save_policy(None, version)
            return {}

        return Change(plan=plan, do=do)

    return command.perform(prepare)


# -- steps of a plan ---------------------------------------------------------------------------------------------------


async def _present(cluster: Cluster) -> tuple[PolicyDocument | None, list[str]]:
    """Return the policy in force; if it is unreadable None, and a step of the plan that says so."""
    try:
        return (await cluster.policy())[0], []
    except BadMetadata as error:
        return None, [f"the document that is there cannot be understood, and goes: {error.message}"]


def _steps(
    before: PolicyDocument | None,
    after: PolicyDocument,
    channels: Channels,
    partitions: int,
    there: ClientInventory,
    *,
    is_first: bool,
) -> list[str]:
    came, went = changed(() if before is None else before.grants, after.grants)
    live = connected(there)
    names = sorted({*exact_names(before, after), *(one.name for one in live)})
    old, new = (None if one is None else Policy(one.grants, channels) for one in (before, after))
    lost = losses(old, new, names, partitions) if before is not None or is_first else []
    return [
        *(["there is no policy yet: from then on what no grant allows is denied"] if is_first else []),
        *(f"grant: {describe_grant(grant)}" for grant in came),
        *(f"take away: {describe_grant(grant)}" for grant in went),
        *(describe_loss(loss, live) for loss in lost),
        *(f"note: the locks of {' and '.join(names)} cannot be told apart" for names in collisions(after.grants)),
        *(f"note: {name} {silence(why)}, so who is connected there is not known" for name, why in there.silent.items()),
    ]


def connected(there: ClientInventory) -> list[ApplicationInstance]:
    return [one for one in there.instances if one.role == Role.CLIENT and one.state != "gone"]


def describe_loss(loss: Loss, live: Sequence[ApplicationInstance]) -> str:
    cut = [one.instance for one in live if one.name == loss.name and not set(loss.partitions).isdisjoint(one.partitions)]
    parts = f"{', '.join(cut[:CUT_MAX])}{f' and {len(cut) - CUT_MAX} more' if len(cut) > CUT_MAX else ''}"
    end = f"; mounted there at the moment: {parts}" if cut else ""
    return f"{loss.name} may not {loss.verb} any more in {format_partitions(loss.partitions)}{end}"


def _typed_channels(typed: Iterable[str]) -> Channels:
    found: dict[str, Ranges] = {}
    for text in typed:
        name, _, ranges = text.partition("=")
        if not is_channel(name) or not is_ranges(ranges):
            raise BadArgument(f"--channel {text}: this is no channel", next_step="write it as orders=0-3")
        found[name] = Ranges(ranges)
    return found


def _unmet(found: PolicyFile, channels: Channels) -> list[str]:
    policy = Policy(found.grants, channels)
    return [finding for one in found.expect if (finding := one.unmet(policy)) is not None]


def _findings(found: PolicyFile, channels: Channels) -> list[str]:
    named = {name for grant in found.grants if grant.partitions is not None for name in named_in(grant.partitions)}
    missing = sorted(named - channels.keys())
    unknown = [f"channel {name}: give its partitions with --channel {name}=LIST" for name in missing]
    shared = [f"the locks of {' and '.join(names)} cannot be told apart" for names in collisions(found.grants)]
    return [*unknown, *_unmet(found, channels), *shared]


# -- what a policy permits ---------------------------------------------------------------------------------------------


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

"""`waltzctl channel`: names for sets of partitions, in a document of the cluster.

A channel name can be used wherever partitions are named: in commands, in the policy, in exports and in applications. So the
plan of a change shows the rights that change with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from typer import Argument, Option

from waltzctl.config.policy import connected, describe_loss, exact_names, losses
from waltzctl.shell.change import Change, ChangeCommand, nothing_to_do
from waltzctl.shell.cluster_target import CommandTarget, using
from waltzctl.shell.numbers import check_partitions, chosen
from waltzctl.shell.options import Misused
from waltzctl.shell.progress import Report
from waltzctl.shell.safety import Danger, Plan
from waltzctl.show.forms import AnyForm, Column, Listing, put
from waltzctl.snapshot.client_inventory import take_inventory
from waltzctl.snapshot.cluster_snapshot import silence
from waltzd.cluster.assignment import format_numbers
from waltzd.cluster.cluster import Cluster, channels_document, save_channels
from waltzd.cluster.documents import ChannelsDocument
from waltzd.errors import EXIT_OK, BadArgument
from waltzd.errors.operations import Unsafe
from waltzd.protocol.channels import (
    CHANNELS_MAX,
    Channels,
    KeyHash,
    Ranges,
    is_channel,
    key_hash,
    key_partitions,
    named_in,
    no_channel,
    numbers_of,
)
from waltzd.protocol.policy import Policy


def list_(*, target: CommandTarget, output: AnyForm = "table") -> int:
    """List the channels, their partitions, and the partitions over which clients of a channel hash its keys; none means
    all partitions of the cluster.

    \b
    Examples:
      waltzctl channel list
      waltzctl channel list -o json
    """
    document, _ = using(target, lambda cluster: channels_document(cluster.coordinator))
    put(
        Listing(
            kind="channels",
            columns=(
                Column("name"),
                Column("partitions", lambda row: row["partitions"], cell=format_numbers),
                Column("keys", lambda row: row["keys"], cell=format_numbers),
            ),
            rows=[
                {
                    "name": name,
                    "partitions": list(numbers_of(ranges)),
                    "keys": list(key_partitions(document.keys[name])) if name in document.keys else [],
                }
                for name, ranges in sorted(document.channels.items())
            ],
            nothing="There are no channels: `waltzctl channel set NAME PARTITIONS` makes one.",
        ),
        output,
    )
    return EXIT_OK


def set_(
    *,
    name: Annotated[str, Argument(metavar="NAME")],
    numbers: Annotated[str | None, Argument(metavar="[PARTITIONS]")] = None,
    is_none: Annotated[bool, Option("--none", help="Delete the channel; its partitions and their data stay.")] = False,
    does_rehash: Annotated[
        bool,
        Option("--rehash", help="Hash keys over the PARTITIONS. First stop the applications that use keys."),
    ] = False,
    command: ChangeCommand,
) -> int:
    """Set the PARTITIONS (like 0-3,7) of a channel, which is created if it does not exist. Its NAME can be used wherever
    partitions are named: in these commands, in the policy, in exports and in applications. A name begins with a letter. A
    partition may be in many channels. A channel named in PARTITIONS counts as its present partitions.

    If the policy has grants on the channel, rights change with its partitions: the plan shows which names lose which
    rights, and their mounts end within two seconds. An application keeps the partitions that it found in the channel until
    it looks the channel up again.

    A client of exactly one channel chooses partitions by key within the channel: over its PARTITIONS when the channel was
    created. They stay when PARTITIONS change, because locks hold only while a key stays in its partition. --rehash hashes
    over the new PARTITIONS, and moves most keys.

    With --none the channel is deleted; this is refused while the policy uses it.

    \b
    Examples:
      waltzctl channel set orders 0-1 --dry-run
      waltzctl channel set orders 0-2 --yes --reason 'more room for orders'
      waltzctl channel set orders 0-3 --rehash --dry-run
      waltzctl channel set orders --none --dry-run
    """
    if is_none is (numbers is not None):
        raise Misused("Name the PARTITIONS of the channel, or use --none.")
    if numbers is None:
        if does_rehash:
            raise Misused("--rehash needs the PARTITIONS of the channel.")
        return _change("channel set --none", name, None, command)
    return _change("channel set", name, chosen(command.target, numbers), command, does_rehash)


def _change(verb: str, name: str, numbers: list[int] | None, command: ChangeCommand, does_rehash: bool = False) -> int:
    if not is_channel(name):
        what = f"{name!r} is no name of a channel: a letter, then letters, digits, dots, dashes and underscores; not `all`"
        raise BadArgument(what)
    wanted = None if numbers is None else Ranges(format_numbers(sorted(numbers)).replace(" ", ""))

    async def prepare(cluster: Cluster) -> Change:
        meta, policy_version = await cluster.meta(), await cluster.policy_version()
        check_partitions(numbers or (), meta.partitions)
        document, version = await channels_document(cluster.coordinator)
        before = document.channels
        if wanted is None and name not in before:
            raise no_channel(name)
        if name not in before and len(before) >= CHANNELS_MAX:
            raise BadArgument(f"a cluster has at most {CHANNELS_MAX} channels", next_step="remove one that is not used")
        keys = _keys_after(document, name, wanted, does_rehash)
        if before.get(name) == wanted and keys == document.keys:
            return nothing_to_do(verb, name)
        after = {other: ranges for other, ranges in before.items() if other != name}
        if wanted is not None:
            after[name] = wanted
        rights = await _rights(cluster, name, before, after, meta.partitions, command)
        plan = Plan(
            verb=verb,
            subject=name,
            steps=(
                *_steps(name, before.get(name), wanted),
                *(() if name not in before else _key_steps(document.keys.get(name), keys.get(name), wanted)),
                *rights,
            ),
            danger=Danger.NONE if name not in before else Danger.ASK,
        )

        async def do(cluster: Cluster, _report: Report) -> Mapping[str, Any]:
            changed = ChannelsDocument(channels=after, keys=keys)
            await save_channels(cluster.coordinator, changed, version, policy=policy_version)
            return {"partitions": sorted(numbers or ())}

        return Change(plan=plan, do=do)

    return command.perform(prepare)


def _keys_after(document: ChannelsDocument, name: str, wanted: Ranges | None, does_rehash: bool) -> Mapping[str, KeyHash]:
    """Return the key hashes of all channels after the change of one. A channel that exists keeps its own."""
    keys = {other: found for other, found in document.keys.items() if other != name}
    if wanted is not None and (does_rehash or name not in document.channels):
        keys[name] = key_hash(wanted)
    elif wanted is not None and name in document.keys:
        keys[name] = document.keys[name]
    return keys


def _key_steps(before: KeyHash | None, after: KeyHash | None, wanted: Ranges | None) -> list[str]:
    if wanted is None:
        return []
    if after != before and after is not None:
        over = "all partitions of the cluster" if before is None else format_numbers(key_partitions(before))
        return [f"hash the keys of its clients over {format_numbers(key_partitions(after))}, not over {over}"]
    if after is None:
        return ["note: its clients hash keys over all partitions of the cluster; --rehash changes that"]
    numbers, partitions = key_partitions(after), numbers_of(wanted)
    if set(numbers) == set(partitions):
        return []
    gone = sorted(set(numbers) - set(partitions))
    notes = [f"note: its clients hash keys over {format_numbers(numbers)} as before; --rehash changes that"]
    if gone:
        notes.append(f"note: its clients refuse keys of {format_numbers(gone)}, which are outside of the channel")
    return notes


def _steps(name: str, before: Ranges | None, after: Ranges | None) -> list[str]:
    if before is None:
        return [f"{name} names the partitions {after}"]
    if after is None:
        return [f"take the name {name} away from the partitions {before}"]
    old, new = set(numbers_of(before)), set(numbers_of(after))
    return [
        f"{name}: {what} {format_numbers(found)}"
        for what, found in (("add", sorted(new - old)), ("take out", sorted(old - new)))
        if found
    ]


async def _rights(
    cluster: Cluster, name: str, before: Channels, after: Channels, partitions: int, command: ChangeCommand
) -> list[str]:
    """Describe which rights a change of the channel takes away. Raise if the policy is unreadable."""
    policy, _ = await cluster.policy()
    grants = () if policy is None else policy.grants
    speaking = [grant for grant in grants if grant.partitions is not None and name in named_in(grant.partitions)]
    if not speaking:
        return []
    if name not in after:
        raise Unsafe(
            f"the policy speaks of the channel {name}: its grants would allow nothing there any more",
            not_done="nothing was changed",
            next_step="take it out of the policy first, with `waltzctl policy set FILE`",
        )
    there = await take_inventory(cluster, command.target.tls)
    live = connected(there)
    names = sorted({*exact_names(policy), *(one.name for one in live)})
    lost = losses(Policy(grants, before), Policy(grants, after), names, partitions)
    return [
        f"note: {len(speaking)} grants of the policy speak of it",
        *(describe_loss(loss, live) for loss in lost),
        *(f"note: {server} {silence(why)}, so who is connected there is not known" for server, why in there.silent.items()),
    ]

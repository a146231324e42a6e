"""Policy file: YAML or JSON with grants, and with expectations of what they allow and deny.

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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from waltzctl.show.forms import JSON_VERSION
from waltzd.cluster.documents import PolicyDocument, whole_grant
from waltzd.disk.real import translate
from waltzd.errors import BadArgument, NoSuchChannel
from waltzd.protocol.channels import Channels, named_in, numbers_of
from waltzd.protocol.document import NESTING_MAX, SCHEMA, Name, decode, with_defaults
from waltzd.protocol.policy import Grant, Policy, Rights, Verb, everything

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

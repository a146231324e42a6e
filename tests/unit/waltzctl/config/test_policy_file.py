"""Files with a policy: what may be left out, what is refused and where, and what one policy takes away from another."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.fuzz.mutate import each, mutated_text, parsed
from waltzctl.config.policy import FILE_BYTES_MAX, Loss, exact_names, load, losses, parse
from waltzd.cluster.documents import PolicyDocument
from waltzd.errors import BadArgument, NoSuchChannel
from waltzd.protocol.channels import Parts, Ranges
from waltzd.protocol.policy import Amount, Grant, Pattern, Policy, Prefix, Quotas, Verb

TEXT = """\
grants:
  - names: [billing-*, audit]
    may: [append, read]
    partitions: 0-3,7
    lock_prefixes: [account]
    quotas: {mounts: 9}
    one_instance: true
  - {names: ["*"], may: [subscribe], partitions: 5}
expect:
  - {name: billing-1, may: append, partition: 7}
  - {name: eve, may_not: read, partition: 5}
"""
GRANTS = (
    Grant(
        names=(Pattern("billing-*"), Pattern("audit")),
        may=(Verb.APPEND, Verb.READ),
        partitions=Parts("0-3,7"),
        lock_prefixes=(Prefix("account"),),
        quotas=Quotas(mounts=Amount(9)),
        one_instance=True,
    ),
    Grant(names=(Pattern("*"),), may=(Verb.SUBSCRIBE,), partitions=Parts("5")),
)


def test_what_may_be_left_out_is_filled_in() -> None:
    found = parse(TEXT.encode(), "policy.yml")
    assert found.document == PolicyDocument(grants=GRANTS)
    assert [one.unmet(Policy(found.grants)) for one in found.expect] == [None, None]


def test_what_is_expected_and_is_not_so() -> None:
    text = TEXT.replace("billing-1, may: append", "eve, may: append").replace("may_not: read", "may_not: subscribe")
    found = parse(text.encode(), "policy.yml")
    assert [one.unmet(Policy(found.grants)) for one in found.expect] == [
        "eve should be allowed to append partition 7, and is not",
        "eve should not be allowed to subscribe partition 5, and is",
    ]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("grants:", "grant:", "grants is missing"),
        ("may: [append, read]", "may: [append, write]", r"grants\[0\].may\[1\] must be append or read or subscribe"),
        ("may: [append, read]", "may: append", r"grants\[0\].may must be a list"),
        ("    one_instance", "    deny", r"grants\[0\].deny is not known"),
        ("mounts: 9", "mount: 9", r"grants\[0\].quotas.mount is not known"),
        ("mounts: 9", "mounts: 0", r"grants\[0\].quotas.mounts must be a whole number from 1"),
        ("0-3,7", "3-1", r"grants\[0\].partitions must be numbers of partitions"),
        ("billing-*, audit", "audit, audit", r"grants\[0\].names has an entry twice"),
        ("billing-*, audit", "on", r"grants\[0\].names\[0\] must be a name"),
        ('["*"]', "[*]", "policy.yml"),
        ('["*"]', "[*a]", "a YAML alias"),
        ('["*"]', "[" * 3000, "nested more than 8 levels"),
        ('["*"]', r'["\UFFFFFFFF"]', "neither YAML nor JSON"),
        ('["*"]', "!!python/name:os.system x", "policy.yml, line 8"),
        ("    partitions: 0-3,7\n", "    partitions: 0\n    partitions: 1\n", "'partitions' comes twice"),
        ("may_not: read", "may_not: read, may: read", r"expect\[1\] must say either may or may_not"),
        ("may_not: read, ", "", r"expect\[1\] must say either may or may_not"),
        (TEXT, "", "policy.yml"),
        (TEXT, "[]", "policy.yml"),
        (TEXT, "{grants: [], exists: false}", "there was no policy"),
        (TEXT, "{grants: [], version: 2}", "another version"),
        (TEXT, "{grants: [], schema: 7, x: 1}", "x is not known"),
        (TEXT, "{? {a: b} : c}", "policy.yml"),
        (TEXT, "[" * 5000, "policy.yml"),
    ],
)
def test_a_mistake_is_told_with_its_place(old: str, new: str, words: str) -> None:
    assert old in TEXT
    with pytest.raises(BadArgument, match=words):
        parse(TEXT.replace(old, new).encode(), "policy.yml")


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "policy.yml"
    path.write_text(TEXT)
    assert load(path).grants == GRANTS
    path.write_bytes(b"#" * (FILE_BYTES_MAX + 1))
    with pytest.raises(BadArgument, match="larger"):
        load(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(BadArgument, match="neither YAML nor JSON"):
        load(path)


def test_a_grant_for_a_partition_that_is_not_there() -> None:
    found = parse(TEXT.encode(), "policy.yml")
    found.check(8, {})
    with pytest.raises(BadArgument, match=r"grants\[0\].partitions: there is no partition 7; the cluster has 7"):
        found.check(7, {})


def test_a_grant_may_name_channels_that_are_there() -> None:
    text = TEXT.replace("0-3,7", "3,orders")
    assert text != TEXT
    found = parse(text.encode(), "policy.yml")
    found.check(8, {"orders": Ranges("0-2,7")})
    with pytest.raises(NoSuchChannel, match=r"grants\[0\].partitions: there is no channel orders"):
        found.check(8, {"other": Ranges("0")})
    with pytest.raises(BadArgument, match="no partition 9"):
        found.check(8, {"orders": Ranges("9")})
    before, after = (Policy(found.grants, {"orders": Ranges(ranges)}) for ranges in ("0-2,7", "1"))
    assert {loss.partitions for loss in losses(before, after, ["audit"], 8)} == {(0, 2, 7)}


@pytest.mark.slow
def test_any_text_is_a_policy_or_refused_in_a_sentence() -> None:
    def check(chance: random.Random) -> None:
        found = parsed(BadArgument, parse, mutated_text(chance, TEXT, TEXT).encode("utf-8", "replace"), "policy.yml")
        if found is not None:
            Policy(found.grants).rights_of("billing-1")

    each("files with a policy", 100, check)


def test_what_one_policy_takes_away() -> None:
    before = parse(TEXT.encode(), "policy.yml").document
    after = PolicyDocument(grants=GRANTS[1:])
    assert exact_names(before, None, after) == ["audit"]
    old, new = Policy(before.grants), Policy(after.grants)
    assert losses(old, new, ["audit", "eve"], 8) == [
        Loss(name="audit", verb=Verb.APPEND, partitions=(0, 1, 2, 3, 7)),
        Loss(name="audit", verb=Verb.READ, partitions=(0, 1, 2, 3, 7)),
        Loss(name="audit", verb=Verb.SUBSCRIBE, partitions=(0, 1, 2, 3, 7)),
    ]
    assert losses(None, new, ["eve"], 6) == [
        Loss(name="eve", verb=Verb.APPEND, partitions=tuple(range(6))),
        Loss(name="eve", verb=Verb.READ, partitions=tuple(range(6))),
        Loss(name="eve", verb=Verb.SUBSCRIBE, partitions=tuple(range(5))),
    ]
    assert losses(old, None, ["audit"], 8) == []

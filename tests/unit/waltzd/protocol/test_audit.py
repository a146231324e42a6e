"""Lines that are chained: whatever is done to them shows, and refusals without end make few of them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from waltzd.protocol import audit
from waltzd.protocol.audit import LOST, START, AuditLine, Break, Chain, Deed, Refusals, decode, encode, spans

LINE = AuditLine(
    number=1, time_ms=1_700_000_000_000, who="waltz://k/role/operator/ann", peer="10.0.0.1:7", what="StorageAdmin/Fence",
    partitions="0", about='session=9 "\n\u2028', code=None,
)  # fmt: skip


def chain_of(count: int) -> list[str]:
    texts, head = [], START
    for number in range(1, count + 1):
        text, head = encode(replace(LINE, number=number), head)
        texts.append(text)
    return texts


def breaks(texts: list[str]) -> list[Break]:
    return list(Chain().follow("audit.log", texts))


def test_a_line_comes_back() -> None:
    for line in (LINE, replace(LINE, code="W2024", times=17)):
        text, head = encode(line, START)
        assert "\n" not in text
        assert decode(text) == (line, START, head)


def test_a_chain_that_nobody_touched_holds() -> None:
    chain, texts = Chain(), chain_of(9)
    assert list(chain.follow("audit.log.1", texts[:5])) == []
    assert list(chain.follow("audit.log", texts[5:])) == []
    assert (chain.lines, chain.is_from_the_start) == (9, True)
    assert chain.first is not None
    assert chain.last is not None
    assert (chain.first.number, chain.last.number) == (1, 9)
    assert decode(texts[-1])[2] == chain.head
    later = Chain()
    assert list(later.follow("audit.log", texts[5:])) == [], "older files may be gone"
    assert not later.is_from_the_start


@pytest.mark.parametrize("at", range(4))
def test_every_character_of_a_line_counts(at: int) -> None:
    texts = chain_of(4)
    for position, character in enumerate(texts[at]):
        changed = texts[at][:position] + ("x" if character != "x" else "y") + texts[at][position + 1 :]
        found = breaks([*texts[:at], changed, *texts[at + 1 :]])
        assert [one.line for one in found] == [at + 1], changed


def test_lines_that_are_taken_out_put_in_or_exchanged_are_noticed() -> None:
    texts = chain_of(6)
    for at in range(1, 5):
        assert [one.line for one in breaks([*texts[:at], *texts[at + 1 :]])] == [at + 1]
        assert breaks([*texts[:at], texts[0], *texts[at:]])
    exchanged = [texts[0], texts[2], texts[1], *texts[3:]]
    assert [one.line for one in breaks(exchanged)] == [2, 3, 4]


def test_who_writes_a_line_anew_writes_another_head() -> None:
    texts = chain_of(5)
    forged, head = encode(replace(LINE, number=2, who="waltz://k/role/operator/eve"), decode(texts[0])[2])
    rest = [forged]
    for number in range(3, 6):
        text, head = encode(replace(LINE, number=number), head)
        rest.append(text)
    chain = Chain()
    assert list(chain.follow("audit.log", [texts[0], *rest])) == [], "the chain alone does not show it"
    assert decode(texts[-1])[2] not in chain.heads, "the head that was told does"


def test_what_could_not_be_written_is_counted() -> None:
    chain = Chain()
    assert list(chain.follow("x", [encode(replace(LINE, what=LOST, times=12), START)[0]])) == []
    assert chain.lost == 12


@pytest.mark.parametrize("text", ["", "x", "{}", '{"hash":"' + "0" * 64 + '"}', chain_of(1)[0][:-1], "[" * 100_000])
def test_nonsense_is_no_line(text: str) -> None:
    with pytest.raises(ValueError, match=r"no line|hash"):
        decode(text)


@pytest.mark.parametrize("body", ['{"a":1', '{"number":"x","before":""', "{[", '{"a":' + "[" * 100_000, '{"number":null'])
def test_nonsense_with_a_hash_is_no_line(body: str) -> None:
    with pytest.raises(ValueError, match="no line"):
        decode(f'{body},"hash":"{audit._hash(body + "}")}"}}')


# -- refusals ----------------------------------------------------------------------------------------------------------

REFUSED = Deed(who="eve", peer="10.0.0.9:1", what="StorageAdmin/Fence", partitions="3", about="session=1", code="W2024")


def test_the_first_is_told_and_then_a_count() -> None:
    refusals = Refusals()
    assert refusals.told(REFUSED, 0) == [REFUSED]
    for number in range(1, 1000):
        assert refusals.told(replace(REFUSED, peer=f"10.0.0.9:{number}"), number) == []
    assert refusals.over(59_999) == []
    (count,) = refusals.over(60_000)
    assert (count.times, count.peer, count.partitions, count.code) == (999, "10.0.0.9:999", "", "W2024")
    assert refusals.told(REFUSED, 60_001) == [REFUSED], "a new minute"
    assert refusals.over(10**9) == [], "there was only one"


def test_each_name_call_and_code_is_counted_apart() -> None:
    refusals = Refusals()
    for other in (
        REFUSED, replace(REFUSED, who="bob"), replace(REFUSED, what="StorageAdmin/Digest"), replace(REFUSED, code="W2002"),
    ):  # fmt: skip
        assert refusals.told(other, 0) == [other]
        assert refusals.told(other, 1) == []
    assert [one.times for one in refusals.over(2, is_all=True)] == [1, 1, 1, 1]


def test_names_without_end_take_no_memory_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "NAMES_MAX", 10)
    refusals = Refusals()
    lines = [line for number in range(1000) for line in refusals.told(replace(REFUSED, who=str(number)), number)]
    assert len(lines) == 11
    assert lines[-1].who == "others"
    assert [one.times for one in refusals.over(10**6)] == [989], "none is forgotten"


@pytest.mark.parametrize("seed", range(20))
def test_no_refusal_is_forgotten_and_none_is_counted_twice(seed: int) -> None:
    drawn, refusals, now, told, count = random.Random(seed), Refusals(), 0, 0, 300
    for _ in range(count):
        now += drawn.choice((0, 1, 1000, 70_000))
        one = replace(REFUSED, who=drawn.choice("abc"), code=drawn.choice(("W2024", "W2002")))
        told += sum(line.times for line in refusals.told(one, now))
    assert told + sum(line.times for line in refusals.over(now, is_all=True)) == count


def test_partitions_in_few_characters() -> None:
    assert spans([7, 0, 1, 2, 3, 3]) == "0-3,7"
    assert spans([]) == ""
    assert len(spans(range(0, 100_000, 2))) <= audit.ABOUT_CHARACTERS_MAX + 1

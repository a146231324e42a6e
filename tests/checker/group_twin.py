"""The rules of `group_verdict` a second time, said as plainly as they can be said, however long that takes."""

from __future__ import annotations

from collections.abc import Iterator

from tests.checker.group_history import Changed, Delivered, GroupHistory, Said
from tests.checker.verdict import Finding
from waltzd.protocol.groups import Exhausted, Mode


def judge_group_slowly(history: GroupHistory) -> set[Finding]:
    partitions = {*history.log, *(one.partition for one in history.delivered)}
    return {Finding(kind, partition, id, who) for partition in partitions for kind, id, who in _wrongs(history, partition)}


def _wrongs(h: GroupHistory, p: int) -> Iterator[tuple[str, int, str]]:
    log = h.log.get(p, {})
    given = [one for one in h.delivered if one.partition == p]
    words = [one for one in h.said if one.partition == p]
    changes = [one for one in h.changed if one.partition == p]
    standing = h.standings.get(p)
    parked = standing.parked if standing else {}
    stopped, is_removed = (standing.stopped, standing.is_removed) if standing else ("", False)
    floor = standing.floor if standing else max(log, default=-1)
    resets = [one for one in changes if one.verb == "reset" and one.epoch]
    unsure = [one for one in changes if one.verb == "reset" and not one.epoch]
    last = max((one.epoch for one in resets), default=0)
    first = h.firsts.get(p, 0)
    ordered, parks = h.mode is Mode.ORDERED, h.exhausted is Exhausted.PARK

    def behind(epoch: int) -> int:
        """Where the group begins in an epoch."""
        newest = max((one.epoch for one in resets if one.epoch <= epoch), default=0)
        return next((one.up_to for one in resets if newest and one.epoch == newest), h.starts.get(p, -1))

    def changed(verb: str, id: int) -> list[int]:
        """The epochs in which an operator did this to an id, or may have."""
        return [one.epoch for one in changes if one.verb == verb and (id in one.ids or id <= one.up_to)]

    def anew(epoch: int, one: Delivered) -> bool:
        return any(epoch < reset.epoch <= one.epoch for reset in resets) or any(reset.at <= one.at for reset in unsure)

    def replayed(one: Delivered) -> bool:
        return any(change.verb == "replay" and one.id in change.ids and change.at <= one.at for change in changes)

    def may_count(word: Said) -> bool:
        return word.answer not in ("late", "unknown", "old")

    def was_done(id: int) -> bool:
        return any(word.id == id and word.verb == "ack" and word.answer in ("taken", "done") for word in words)

    def given_again(word: Said) -> bool:
        return any(one.id == word.id and one.epoch == word.epoch and one.tag > word.tag for one in given)

    def away(begin: int, end: int) -> int:
        return sum(max(0, min(end, until) - max(begin, since)) for since, until in h.outages)

    def owed(word: Said) -> bool:
        return (
            h.window is not None
            and word.answer == "taken"
            and word.returned is not None
            and not given_again(word)
            and any(
                other.epoch == word.epoch
                and other.answer not in ("", "old")
                and other.at - word.returned - away(word.returned, other.at) > h.window
                for other in words
            )
        )

    def may_have_waited(word: Said, one: Delivered) -> bool:
        """In an ordered group, for one in front of it that was not done."""
        return (
            any(other.epoch == one.epoch and other.id < one.id for other in given)
            or any(other.id == one.id and word.epoch < other.epoch < one.epoch for other in given)
            or any(id < one.id for id in parked)
            or any(c.verb in ("replay", "discard") and any(id < one.id for id in c.ids) for c in changes)
        )

    # what is left undone
    if not stopped and floor < max(log, default=-1):
        yield "unfinished", floor + 1, ""
    for id, written in log.items():
        is_due = h.is_wanted(written) and id > behind(1 << 60) and id >= first and not (stopped and id > floor)
        is_left = any(not epoch or epoch >= last for verb in ("skip", "discard") for epoch in changed(verb, id))
        acked = any(word.verb == "ack" and word.id == id and may_count(word) and word.epoch >= last for word in words)
        if is_due and not is_left and not acked and id not in parked and all(id > one.up_to for one in unsure):
            yield "skipped", id, ""

    # what was given out
    for one in given:
        found = log.get(one.id)
        lowest = min([behind(one.epoch)] + [reset.up_to for reset in unsure if reset.at <= one.at])
        is_it = found is not None and found.name == one.name and found.header == one.header
        if not is_it or found is None or not h.is_wanted(found) or (one.id <= lowest and not replayed(one)):
            yield "not wanted", one.id, one.holder
        if parks and one.attempt > h.deliver_max:
            yield "attempts", one.id, one.holder
        failed = 0
        for word in words:
            if word.id != one.id:
                continue
            kept = word.is_kept or owed(word)
            before = word.epoch < one.epoch and not anew(word.epoch, one)
            if word.verb == "nack" and word.answer == "taken":
                failed += word.tag < one.tag if word.epoch == one.epoch else kept and before
            if word.answer == "taken" and word.epoch == one.epoch and one.tag > word.tag:
                pulled = ordered and (
                    replayed(one)
                    or any(id < one.id for id in parked)
                    or (is_removed and parks and any(o.id < one.id and not was_done(o.id) for o in given))
                    or any(c.verb in ("replay", "discard") and any(id < one.id for id in c.ids) for c in changes)
                    or any(o.epoch == one.epoch and word.tag < o.tag <= one.tag and o.id < one.id for o in given)
                )
                if (word.verb == "ack" or (word.verb == "reject" and parks and not replayed(one))) and not pulled:
                    yield "settled and given out", one.id, one.holder
            is_void = ordered and given_again(word)
            if word.verb == "ack" and word.answer in ("taken", "done") and before and not replayed(one) and not is_void:
                if word.is_kept:
                    yield "kept and given out", one.id, one.holder
                elif owed(word) and not (ordered and may_have_waited(word, one)):
                    yield "forgotten", one.id, one.holder
        if not ordered and failed >= one.attempt and not _named(changes, "replay", one.id):
            yield "count lost", one.id, one.holder
        for change in changes:
            is_skipped = change.verb == "skip" and change.epoch and one.id <= change.up_to
            if is_skipped and one.epoch > change.epoch and not anew(change.epoch, one) and not replayed(one):
                yield "skipped and given out", one.id, one.holder

    # in which order
    newest = max((one.epoch for one in given), default=0)
    for one in given if h.mode is not Mode.QUEUE and not unsure else ():
        if one.epoch < last or one.id not in log or not h.is_wanted(log[one.id]):
            continue
        for id, written in log.items():
            same = ordered or (written.key is not None and written.key == log[one.id].key)
            if not same or id >= one.id or not h.is_wanted(written) or id <= behind(one.epoch) or id < first:
                continue
            if id in parked or _named(changes, "replay", id) or _named(changes, "discard", id):
                continue
            is_open = any(other.id == id and other.epoch == one.epoch for other in given)
            since = max((reset.epoch for reset in resets if reset.epoch <= one.epoch), default=0)
            done = any(
                word.id == id
                and word.verb != "nack"
                and may_count(word)
                and word.at <= one.at
                and (word.epoch == one.epoch or (since <= word.epoch < one.epoch and not is_open))
                for word in words
            )
            done |= any(change.verb == "skip" and id <= change.up_to and change.at <= one.at for change in changes)
            done |= ordered and any(
                other.id == id and other.epoch == one.epoch and other.holder == one.holder and other.at <= one.at
                for other in given
            )
            shown = (
                not parks
                or (one.epoch == newest and not is_removed)
                or any(other.id == id and other.epoch == one.epoch and other.tag > one.tag for other in given)
                or any(
                    word.id == id and word.epoch == one.epoch and word.answer == "taken" and word.at > one.at
                    for word in words
                )
            )
            if shown and not done:
                yield "order", one.id, one.holder

    rest = [one for one in given if one.epoch == newest and not (stopped and one.id > floor)]
    for one in rest if ordered and not unsure else ():
        if not any(other.id == one.id and other.tag > one.tag for other in rest) and one.id in log:
            for other in rest:
                lower = other.id < one.id and other.tag > one.tag and other.id in log and h.is_wanted(log[other.id])
                moved = any(
                    _named(changes, verb, id) or id in parked for verb in ("replay", "discard") for id in (one.id, other.id)
                )
                if lower and h.is_wanted(log[one.id]) and not moved and not changed("skip", one.id):
                    yield "order", one.id, ""

    # how much at a time
    for one in given:
        held = 0
        for other in given:
            ends = [
                word.at
                for word in words
                if word.answer == "taken"
                and (word.holder, word.epoch, word.tag, word.id) == (other.holder, other.epoch, other.tag, other.id)
            ]
            same = other.holder == one.holder and other.epoch == one.epoch
            held += same and other.at <= one.at and bool(ends) and max(ends) > one.at
        if held > h.room:
            yield "room", -1, one.holder

    # who may still say something
    for word in words:
        is_over = any(one.epoch > word.epoch and one.at < word.at for one in given)
        if (word.answer == "taken" and word.epoch < word.stands_in) or (word.is_kept and is_over):
            yield "old epoch", word.id, word.holder
        is_lost = word.is_kept and word.verb == "ack" and word.answer == "taken" and word.id in parked
        is_lost &= not (ordered and given_again(word))
        if is_lost and not unsure and not any(reset.epoch > word.epoch for reset in resets):
            yield "kept and given out", word.id, word.holder

    # what operators see
    for id, failures in parked.items():
        rejected = any(word.id == id and word.verb == "reject" and may_count(word) for word in words)
        if parks and failures < h.deliver_max and not rejected:
            yield "parked early", id, ""
    for change in changes:
        if change.verb != "replay" or not change.epoch or unsure or any(reset.epoch > change.epoch for reset in resets):
            continue
        for id in change.ids:
            acked = any(word.id == id and word.verb == "ack" and may_count(word) and word.at > change.at for word in words)
            is_left = bool(changed("skip", id)) or _named(changes, "discard", id)
            if id not in parked and not acked and not is_left and not (stopped and id > floor):
                yield "replay lost", id, ""


def _named(changes: list[Changed], verb: str, id: int) -> bool:
    return any(one.verb == verb and id in one.ids for one in changes)

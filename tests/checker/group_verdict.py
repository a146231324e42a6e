"""Whether what members of a consumer group saw could have come from one that keeps its promises.

Only what is certain is found wrong. An owner decides in an order that nobody else sees, but tags tell much of it: they rise
with each delivery of an epoch, and an acknowledgement that was *taken* was heard while the delivery with its tag was the
last one of that transaction. So a later tag is a redelivery of what was settled, whatever the clocks say. Where tags say
nothing, times do: a member that was given one transaction before anybody had said a word about the one in front of it was
given it too early. The dumb twin of all this, which compares everything with everything, is in
`tests/checker/group_twin.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import groupby

from tests.checker.group_history import Changed, Delivered, GroupHistory, Said, Standing
from tests.checker.verdict import Finding, Verdict
from waltzd.protocol.groups import Exhausted, Mode

NEVER, ALWAYS = float("inf"), float("-inf")
POSSIBLE = ("taken", "done", "")
"""Answers of what may have counted."""

EXPLAINED = {
    "skipped": "nobody acknowledged it, and it is not parked, left or lost by an operator's word",
    "unfinished": "everything is well, and the group has not come to the end of the log",
    "not wanted": "it was given out and is not in the log, or the group does not want it",
    "settled and given out": "an owner took the acknowledgement, and gave it out again all the same",
    "kept and given out": "its acknowledgement was said to be on the disks of a majority, and it was not done after that",
    "forgotten": "its acknowledgement was heard so long before the end of an owner that it had to be on disks",
    "order": "it was given out before the one in front of it was done",
    "attempts": "it was given out more often than it may fail",
    "count lost": "it has failed more often than the number of its attempt says",
    "room": "a member had more in its hands than it may",
    "old epoch": "what was said of an old epoch counted",
    "parked early": "it is parked, and its tries were not used up",
    "skipped and given out": "an operator had skipped it",
    "replay lost": "an operator had it done again, and it was not",
}
"""All kinds of findings."""


def judge_group(history: GroupHistory) -> Verdict:
    places = [_Place(history, partition) for partition in sorted({*history.log, *(d.partition for d in history.delivered)})]
    findings = {finding for place in places for finding in place.findings()}
    answers = Counter(one.answer or "unanswered" for one in history.said)
    epochs = {(one.partition, one.epoch) for one in history.delivered}
    lost = [nanoseconds for place in places for nanoseconds in place.lost()]
    counts = {
        "transactions": sum(len(place.wanted) for place in places),
        "deliveries": len(history.delivered),
        "again": len(history.delivered) - len({(one.partition, one.id) for one in history.delivered}),
        **dict(sorted(answers.items())),
        "kept": sum(one.is_kept for one in history.said),
        "lost": len(lost),
        "ms at most until lost": max(lost, default=0) // 10**6,
        "holders": len({one.holder for one in history.delivered}),
        "epochs": len(epochs),
        "parked": sum(len(standing.parked) for standing in history.standings.values()),
        "changes": len(history.changed),
    }
    return Verdict(tuple(sorted(findings)), counts, EXPLAINED)


class _Place:
    """One partition of the group."""

    def __init__(self, history: GroupHistory, partition: int) -> None:
        self.history, self.partition = history, partition
        self.mode, self.parks = history.mode, history.exhausted is Exhausted.PARK
        self.is_ordered = history.mode is Mode.ORDERED
        self.log = history.log.get(partition, {})
        self.first = history.firsts.get(partition, 0)
        self.wanted = sorted(id for id, one in self.log.items() if history.is_wanted(one))
        self.delivered = sorted((one for one in history.delivered if one.partition == partition), key=lambda one: one.at)
        self.said = sorted((one for one in history.said if one.partition == partition), key=lambda one: one.at)
        self.standing = history.standings.get(partition)
        changed = [one for one in history.changed if one.partition == partition]
        resets = [one for one in changed if one.verb == "reset"]
        self.resets = sorted((one for one in resets if one.epoch), key=lambda one: one.epoch)
        self.unsure = [one for one in resets if not one.epoch]
        """Resets of which nobody knows whether they were done."""
        self.skips = [one for one in changed if one.verb == "skip"]
        self.replays = [one for one in changed if one.verb == "replay"]
        self.discards = [one for one in changed if one.verb == "discard"]
        parked = self.standing.parked if self.standing is not None else {}
        self.aside = {*parked, *(id for one in (*self.replays, *self.discards) for id in one.ids)}
        """Was parked at some time."""
        self.by_id: dict[int, list[Delivered]] = {}
        for delivery in self.delivered:
            self.by_id.setdefault(delivery.id, []).append(delivery)
        self.words: dict[int, list[Said]] = {}
        for word in self.said:
            self.words.setdefault(word.id, []).append(word)
        self.heard: dict[int, int] = {}
        """When something was said last that the owner of an epoch answered."""
        for word in self.said:
            if word.answer not in ("", "old"):
                self.heard[word.epoch] = max(self.heard.get(word.epoch, word.at), word.at)

    def findings(self) -> Iterator[Finding]:
        yield from self.skipped()
        yield from self.foreign()
        yield from self.again()
        yield from self.order()
        yield from self.counts()
        yield from self.rooms()
        yield from self.old()
        yield from self.operators()

    def _finding(self, kind: str, id: int, who: str = "", detail: str = "") -> Finding:
        return Finding(kind, self.partition, id, who, detail)

    # -- where it begins

    def _base(self, epoch: int | None = None) -> tuple[int, int]:
        """Behind which id the group begins in an epoch, and since which; or in the last one."""
        after, since = self.history.starts.get(self.partition, -1), 0
        for reset in self.resets:
            if epoch is None or reset.epoch <= epoch:
                after, since = reset.up_to, reset.epoch
        return after, since

    def _begins_anew(self, before: int, delivery: Delivered) -> bool:
        """Whether a reset came, or may have come, between an epoch and a delivery."""
        return any(before < one.epoch <= delivery.epoch for one in self.resets) or any(
            one.at <= delivery.at for one in self.unsure
        )

    def _is_replayed(self, delivery: Delivered) -> bool:
        return any(delivery.id in one.ids and one.at <= delivery.at for one in self.replays)

    # -- the rules

    def skipped(self) -> Iterator[Finding]:
        standing = self.standing or Standing(max(self.log, default=-1))
        if not standing.stopped and standing.floor < max(self.log, default=-1):
            yield self._finding("unfinished", standing.floor + 1, detail=f"it is done up to {standing.floor}")
        after, since = self._base()
        left = [one for one in self.discards if not one.epoch or one.epoch >= since]
        for id in self.wanted:
            if id <= after or id < self.first or (standing.stopped and id > standing.floor) or id in standing.parked:
                continue
            if any(id <= one.up_to for one in self.unsure) or any(id in one.ids for one in left):
                continue
            if any(id <= one.up_to and (not one.epoch or one.epoch >= since) for one in self.skips):
                continue
            words = self.words.get(id, ())
            if not any(one.verb == "ack" and one.answer in POSSIBLE and one.epoch >= since for one in words):
                yield self._finding("skipped", id, detail=f"delivered {len(self.by_id.get(id, ()))} times")

    def foreign(self) -> Iterator[Finding]:
        for one in self.delivered:
            written = self.log.get(one.id)
            after = min([self._base(one.epoch)[0], *(reset.up_to for reset in self.unsure if reset.at <= one.at)])
            if written is None or (written.name, written.header) != (one.name, one.header):
                yield self._finding("not wanted", one.id, one.holder, f"{one.name}, the log holds {written}")
            elif not self.history.is_wanted(written):
                yield self._finding("not wanted", one.id, one.holder, f"its header is {written.header}")
            elif one.id <= after and not self._is_replayed(one):
                yield self._finding("not wanted", one.id, one.holder, f"the group begins behind {after}")

    def again(self) -> Iterator[Finding]:
        """What was done and is given out again."""
        for id, words in self.words.items():
            acks = [one for one in words if one.verb == "ack" and one.answer in ("taken", "done")]
            for word in words:
                if (
                    word.answer != "taken"
                    or word.verb not in ("ack", "reject")
                    or (word.verb == "reject" and not self.parks)
                ):
                    continue
                for one in self.by_id.get(id, ()):
                    is_done = one.epoch == word.epoch and one.tag > word.tag and not self._comes_back(word, one)
                    if is_done and (word.verb == "ack" or not self._is_replayed(one)):
                        yield self._finding("settled and given out", id, one.holder, f"taken from {word.holder}")
            for word in acks:
                yield from self._kept(word)

    def _comes_back(self, word: Said, delivery: Delivered) -> bool:
        """In an ordered group everything behind one that failed is given out again, after that one. That one may
        have been parked before anybody was given it, or while nobody noticed it in a group that was removed later; and
        what was replayed does not stand where its id says."""
        if self.is_ordered and (self._is_replayed(delivery) or any(id < delivery.id for id in self.aside)):
            return True
        is_removed = self.parks and self.standing is not None and self.standing.is_removed
        if self.is_ordered and is_removed and any(id < delivery.id and not self._is_done(id) for id in self.by_id):
            return True
        return self.is_ordered and any(
            one.epoch == word.epoch and word.tag < one.tag <= delivery.tag and one.id < delivery.id
            for one in self.delivered
        )

    def _is_done(self, id: int) -> bool:
        return any(one.verb == "ack" and one.answer in ("taken", "done") for one in self.words.get(id, ()))

    def _kept(self, word: Said) -> Iterator[Finding]:
        kind = "kept and given out" if word.is_kept else "forgotten"
        if not (word.is_kept or self._is_owed(word)) or (self.is_ordered and self._is_given_again(word)):
            return
        for one in self.by_id.get(word.id, ()):
            if one.epoch <= word.epoch or self._begins_anew(word.epoch, one) or self._is_replayed(one):
                continue
            if not word.is_kept and self.is_ordered and self._may_have_waited(word, one):
                continue
            yield self._finding(kind, word.id, one.holder, f"epoch {word.epoch}, and again in {one.epoch}")
        is_parked = self.standing is not None and word.id in self.standing.parked
        is_anew = self.unsure or any(one.epoch > word.epoch for one in self.resets)
        if word.is_kept and word.answer == "taken" and is_parked and not is_anew:
            yield self._finding(kind, word.id, word.holder, "it is parked")

    def _is_owed(self, word: Said) -> bool:
        """Whether the owner that heard it went on for so long that it must have written it."""
        window = self.history.window
        if window is None or word.answer != "taken" or word.returned is None:
            return False
        if self._is_given_again(word):
            return False
        return self._time_to_write(word) > window

    def _time_to_write(self, word: Said) -> int:
        """How long the owner that answered it is known to have gone on, with a group log that could be written."""
        assert word.returned is not None
        begin, end = word.returned, self.heard.get(word.epoch, word.at)
        return end - begin - sum(max(0, min(end, until) - max(begin, since)) for since, until in self.history.outages)

    def lost(self) -> Iterator[int]:
        """Of each acknowledgement that was taken and lost with its owner, how long that had gone on after it."""
        for word in self.said:
            if word.verb != "ack" or word.answer != "taken" or word.returned is None or self._is_given_again(word):
                continue
            for one in self.by_id.get(word.id, ()):
                if one.epoch <= word.epoch or self._begins_anew(word.epoch, one) or self._is_replayed(one):
                    continue
                if not (self.is_ordered and self._may_have_waited(word, one)):
                    yield max(0, self._time_to_write(word))
                    break

    def _is_given_again(self, word: Said) -> bool:
        """In an ordered group it came back with one that had failed, and what was said of it before is void."""
        return any(one.epoch == word.epoch and one.tag > word.tag for one in self.by_id.get(word.id, ()))

    def _may_have_waited(self, word: Said, delivery: Delivered) -> bool:
        """In an ordered group, for one in front of it that was not done, in its epoch or in one after that."""
        return (
            any(id < word.id for id in self.aside)
            or any(one.epoch == delivery.epoch and one.id < delivery.id for one in self.delivered)
            or any(word.epoch < one.epoch < delivery.epoch for one in self.by_id[word.id])
        )

    def order(self) -> Iterator[Finding]:
        """Nothing is given out before what stands in front of it is done. In an epoch that others have followed, that may
        have been parked, and the parking lost with its owner: unless it shows itself to be open later in this epoch."""
        if self.mode is Mode.QUEUE or self.unsure:
            return
        if self.is_ordered:
            yield from self._comes_back_behind()
        since, last = self._base()[1], max((one.epoch for one in self.delivered), default=0)
        for (epoch, holder), found in _grouped(self.delivered):
            if epoch < since:
                continue
            is_known = self.standing is None or not self.standing.is_removed
            is_last, open_later = (epoch == last and is_known) or not self.parks, self._open_later(epoch)
            asked: dict[int, list[Delivered]] = {}
            for one in found:
                asked.setdefault(one.id, []).append(one)
            latest: dict[str, float] = {}
            shown: dict[str, list[tuple[float, int]]] = {}
            for id in self.wanted:
                key = self._key(id)
                if key is None:
                    continue
                ready = latest.get(key, ALWAYS)
                for one in asked.get(id, ()):
                    if ready > one.at or any(done > one.at and tag > one.tag for done, tag in shown.get(key, ())):
                        yield self._finding("order", id, holder)
                        break
                done = self._done_at(id, epoch)
                if self.is_ordered and id in asked:
                    done = min(done, asked[id][0].at)
                latest[key] = max(ready, done if is_last else min(done, self._taken_at(id, epoch)))
                if id in open_later:
                    shown.setdefault(key, []).append((done, open_later[id]))

    def _comes_back_behind(self) -> Iterator[Finding]:
        """In the last epoch of an ordered group the last deliveries rise as the ids do: what was given out behind one that
        failed was given out behind it once more."""
        epoch = max((one.epoch for one in self.delivered), default=0)
        highest = -1
        for id in self.wanted:
            tags = [one.tag for one in self.by_id.get(id, ()) if one.epoch == epoch]
            if not tags or id in self.aside or (self.standing and self.standing.stopped and id > self.standing.floor):
                continue
            if max(tags) < highest and not any(id <= one.up_to for one in self.skips):
                yield self._finding("order", id, detail="it did not come back behind the one in front of it")
            highest = max(highest, *tags)

    def _open_later(self, epoch: int) -> dict[int, int]:
        """What was given out behind a later one of its key in this epoch; and its last tag."""
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for one in self.delivered:
            if one.epoch == epoch:
                first[one.id] = min(one.tag, first.get(one.id, one.tag))
                last[one.id] = max(one.tag, last.get(one.id, one.tag))
        lowest: dict[str, float] = {}
        found: dict[int, int] = {}
        for id in reversed(self.wanted):
            if id in first and (key := self._key(id)) is not None:
                if last[id] > lowest.get(key, NEVER):
                    found[id] = last[id]
                lowest[key] = min(first[id], lowest.get(key, NEVER))
        return found

    def _taken_at(self, id: int, epoch: int) -> float:
        """When something was said last that shows it to have been in a member's hands in this epoch."""
        words = self.words.get(id, ())
        return max((one.at for one in words if one.epoch == epoch and one.answer == "taken"), default=ALWAYS)

    def _key(self, id: int) -> str | None:
        return "" if self.is_ordered else self.log[id].key

    def _done_at(self, id: int, epoch: int) -> float:
        """When it was out of the way of what is behind it, at the earliest."""
        after, since = self._base(epoch)
        if id <= after or id < self.first or id in self.aside:
            return ALWAYS
        times: list[float] = [one.at for one in self.skips if id <= one.up_to]
        is_open = any(one.epoch == epoch for one in self.by_id.get(id, ()))
        for word in self.words.get(id, ()):
            is_of_it = word.epoch == epoch or (since <= word.epoch < epoch and not is_open)
            if word.verb != "nack" and word.answer in POSSIBLE and is_of_it:
                times.append(word.at)
        return min(times, default=NEVER)

    def counts(self) -> Iterator[Finding]:
        replayed = {id for one in self.replays for id in one.ids}
        for one in self.delivered:
            if self.parks and one.attempt > self.history.deliver_max:
                yield self._finding("attempts", one.id, one.holder, f"attempt {one.attempt}")
            if self.is_ordered or one.id in replayed:
                continue
            failures = sum(
                word.verb == "nack" and word.answer == "taken" and self._counts(word, one)
                for word in self.words.get(one.id, ())
            )
            if one.attempt <= failures:
                yield self._finding("count lost", one.id, one.holder, f"attempt {one.attempt} after {failures} failures")

    def _counts(self, word: Said, delivery: Delivered) -> bool:
        if word.epoch == delivery.epoch:
            return word.tag < delivery.tag
        is_known = word.is_kept or self._is_owed(word)
        return word.epoch < delivery.epoch and is_known and not self._begins_anew(word.epoch, delivery)

    def rooms(self) -> Iterator[Finding]:
        """Certainly in its hands is what an owner took a word about, from its delivery until then."""
        ends = {(one.holder, one.epoch, one.tag, one.id): one.at for one in self.said if one.answer == "taken"}
        for (epoch, holder), found in _grouped(self.delivered):
            times = [(one.at, ends.get((holder, epoch, one.tag, one.id), one.at)) for one in found]
            changes = sorted([(begin, 1) for begin, end in times if begin < end] + [(end, -1) for _, end in times])
            held = most = 0
            for _, step in changes:
                held += step
                most = max(most, held)
            if most > self.history.room:
                yield self._finding("room", -1, holder, f"{most} at a time in epoch {epoch}")

    def old(self) -> Iterator[Finding]:
        begins: dict[int, int] = {}
        for one in self.delivered:
            begins.setdefault(one.epoch, one.at)
        for word in self.said:
            if word.answer == "taken" and word.epoch < word.stands_in:
                yield self._finding("old epoch", word.id, word.holder, f"epoch {word.epoch} counted in {word.stands_in}")
            elif word.is_kept and any(epoch > word.epoch and at < word.at for epoch, at in begins.items()):
                yield self._finding("old epoch", word.id, word.holder, f"epoch {word.epoch} was over, and it was kept")

    def operators(self) -> Iterator[Finding]:
        parked = self.standing.parked if self.standing is not None else {}
        for id, failures in parked.items():
            words = self.words.get(id, ())
            is_rejected = any(one.verb == "reject" and one.answer in POSSIBLE for one in words)
            if self.parks and failures < self.history.deliver_max and not is_rejected:
                yield self._finding("parked early", id, detail=f"after {failures} failures")
        for skip in self.skips:
            for one in self.delivered:
                is_later = skip.epoch and one.epoch > skip.epoch and one.id <= skip.up_to
                if is_later and not self._begins_anew(skip.epoch, one) and not self._is_replayed(one):
                    yield self._finding("skipped and given out", one.id, one.holder, f"it had skipped to {skip.up_to}")
        for replay in self.replays:
            yield from self._lost_replays(replay, parked)

    def _lost_replays(self, replay: Changed, parked: dict[int, int]) -> Iterator[Finding]:
        if not replay.epoch or self.unsure or any(one.epoch > replay.epoch for one in self.resets):
            return
        for id in replay.ids:
            is_left = any(id in one.ids for one in self.discards) or any(id <= one.up_to for one in self.skips)
            is_waiting = self.standing is not None and bool(self.standing.stopped) and id > self.standing.floor
            words = self.words.get(id, ())
            is_done = any(one.verb == "ack" and one.answer in POSSIBLE and one.at > replay.at for one in words)
            if id not in parked and not is_left and not is_waiting and not is_done:
                yield self._finding("replay lost", id, detail="it was to be done again")


def _grouped(delivered: list[Delivered]) -> Iterator[tuple[tuple[int, str], list[Delivered]]]:
    """By epoch and holder, each in the order in which it came."""
    ordered = sorted(delivered, key=lambda one: (one.epoch, one.holder, one.at))
    for key, found in groupby(ordered, key=lambda one: (one.epoch, one.holder)):
        yield key, list(found)

"""A consumer group with real daemons: made while the cluster runs, worked on, looked at, and moved by an operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.cli.outcome import as_json
from waltzctl.local_cluster.local import LocalCluster
from waltzd.client.blocking import BlockingClient

Tool = Callable[..., Any]


def test_what_a_member_rejects_is_seen_replayed_and_done(live: LocalCluster, waltzctl: Tool) -> None:
    place = "--directory", str(live.directory)

    def told(*words: str) -> Any:
        return as_json(waltzctl("group", *words, *place, "-o", "json"))

    made = told("create", "mailer", "--start", "last", "--tries", "1", "--then", "park")
    assert not any("make the log" in step for step in made["steps"]), "a new cluster has it"
    assert made["is_new"]
    assert told("create", "mailer", "--tries", "1")["result"] == "nothing-to-do"
    with BlockingClient(",".join(live.server_addresses), partitions=(0, 1)) as client:
        first = client.end_position(0) + 1
        for number in range(3):
            client.append(b"letter %d" % number, partition=0)
        assert told("describe", "mailer")["lag"] == 3
        with client.subscribe("mailer", member="one") as subscription:
            deliveries = iter(subscription)
            for delivery in (next(deliveries), next(deliveries)):
                if delivery.id == first:
                    delivery.reject("no such address")
                else:
                    delivery.ack(durable=True)
            at_work = told("describe", "mailer")
            assert {row["member"] for row in at_work["members"]} == {"one"}
            zero = at_work["partitions"][0]
            assert (zero["state"], zero["parked"], zero["lag"], zero["in_flight"]) == ("at work", 1, 1, 1)
            (parked,) = told("parked", "list", "mailer", "--payload")["parked"]
            assert (parked["id"], parked["tries"], parked["member"]) == (first, 1, "one")
            assert (parked["reason"], parked["payload"]) == ("no such address", "letter 0")
            totals = as_json(waltzctl("status", *place, "-o", "json"))["groups"]
            assert (totals["groups"], totals["parked"], totals["trouble"]) == (1, 1, "")
            assert told("parked", "replay", "mailer", f"0:{first}", "--yes")["partitions"][0]["count"] == 1
            for delivery in (next(deliveries), next(deliveries)):
                delivery.ack(durable=True)
    assert told("describe", "mailer")["lag"] == 0
    moved = told("reset", "mailer", "--partitions", "0", "--after", str(first), "--confirm", "mailer")
    assert moved["partitions"][0]["floor"] == first
    assert told("describe", "mailer")["lag"] == 2
    skipped = told("reset", "mailer", "--skip-through", f"0={first + 1}", "--confirm", "mailer")
    assert skipped["partitions"][0]["floor"] == first + 1
    assert told("set", "mailer", "--tries", "3", "--yes")["result"] == "done"
    assert told("describe", "mailer")["settings"]["deliver_max"] == 3
    assert told("remove", "mailer", "--confirm", "mailer")["result"] == "done"
    assert told("list")["groups"] == []

"""What a transaction of the bank example says: the one place that knows how its payload is written.

The example (`tests/examples/bank.py`) writes it; `replay` reads it out of an export. A transfer takes an amount from one
account of a branch and gives it to another; a branch is a partition. Money comes from the mint, the one account that may be
below zero. Pure, and without anything that only analysts have: applications import it, too.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

MINT = 0
COLUMNS = {"from": "bigint", "to": "bigint", "amount": "bigint"}
"""The members of the JSON object, and their types as decoders call them."""


@dataclass(frozen=True, kw_only=True)
class Movement:
    payer: int
    receiver: int
    amount: int


def payload_of(movement: Movement, by: str) -> bytes:
    """`by`: who asked for it, for people."""
    found = {"from": movement.payer, "to": movement.receiver, "amount": movement.amount, "by": by}
    return json.dumps(found).encode()


def movement_of(payload: bytes) -> Movement:
    found = json.loads(payload)
    return Movement(payer=found["from"], receiver=found["to"], amount=found["amount"])

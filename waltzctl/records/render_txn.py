"""How transactions look: a line each, an object a line, or their payloads and nothing else.

They are printed as they come, so a range of any size needs the memory of what is on its way. Nothing that stands in a
payload reaches a terminal as it is, except where the payload itself was asked for.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import typer

from waltzctl.records.decode import decoded, line
from waltzctl.render import JSON_VERSION, console, put_json, size

if TYPE_CHECKING:
    from waltzctl.records.append import Submitted
    from waltzd.client.view import Transaction

Sink: TypeAlias = "Callable[[Transaction], None]"
Form = Literal["table", "json", "raw"]


def sink(output: str, decode: str, *, with_partition: bool = False) -> Sink:
    if output == "json":
        return lambda transaction: typer.echo(json.dumps(as_json(transaction, decode)))
    if output == "raw":
        return lambda transaction: typer.echo(transaction.payload, nl=False)
    return _Table(decode, with_partition=with_partition)


def as_json(transaction: Transaction, decode: str) -> dict[str, Any]:
    found = decoded(transaction.payload, decode)
    client, generation, sequence = transaction.request
    return {
        "version": JSON_VERSION, "partition": transaction.partition, "id": transaction.id, "header": transaction.header,
        "client": client, "generation": generation, "sequence": sequence, "size": transaction.length,
        "payload_encoding": found.encoding, "payload": found.value,
    }  # fmt: skip


class _Table:
    def __init__(self, decode: str, *, with_partition: bool) -> None:
        self._decode = decode
        self._with_partition = with_partition
        self._width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 80
        self._is_begun = False

    def __call__(self, transaction: Transaction) -> None:
        if not self._is_begun:
            self._is_begun = True
            typer.echo(self._start("partition", "id", "header", "client", "size") + "payload")
        start = self._start(
            transaction.partition, transaction.id, transaction.header, transaction.request[0], transaction.length
        )
        typer.echo((start + fitting(transaction.payload, self._decode, self._width - len(start))).rstrip())

    def _start(self, partition: object, id: object, header: object, client: object, length: object) -> str:
        first = f"{partition:>9} " if self._with_partition else ""
        return f"{first}{id:>10} {header:>6} {client:>7} {length:>8}  "


def fitting(payload: bytes, decode: str, width: int) -> str:
    """The beginning of a payload in so many columns; some characters need two."""
    from rich.cells import cell_len, set_cell_size

    width = max(width, 8)
    text = line(payload, decode, width + 1)
    return text if cell_len(text) <= width else set_cell_size(text, width - 1).rstrip() + "…"


# -- append ------------------------------------------------------------------------------------------------------------


def submitted(found: Submitted, output: str) -> None:
    if output == "json":
        put_json(
            {
                "result": found.result, "partition": found.partition, "id": found.id, "size": found.size,
                "client": found.client, "mark": found.mark, "reason": found.reason, "conflict_id": found.conflict_id,
                "lock": found.lock, "milliseconds": round(1000 * found.seconds, 1),
            }
        )  # fmt: skip
        return
    if found.id is not None:
        said = f"committed: partition {found.partition}, id {found.id}"
        console().print(f"{said}  ({size(found.size)}, {1000 * found.seconds:.1f} ms)", soft_wrap=True)

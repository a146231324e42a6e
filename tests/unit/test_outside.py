"""What other programs rely on, as text in `tests/golden/outside`: messages, errors, commands with their options.

A change of one of these files is a change for users: it belongs in CHANGELOG.md. To write the files again:
`.venv/bin/python -m tests.unit.test_outside`. Metrics are pinned by docs/metrics.md, settings by docs/configuration.md and
`configs/`, files on disk by `tests/golden/format`, documents in ZooKeeper by `tests/golden/meta`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import typer
from google.protobuf.descriptor_pb2 import FieldDescriptorProto

from waltzctl import main
from waltzd import errors
from waltzd.wire import wire_pb2

FOLDER = Path(__file__).parents[1] / "golden" / "outside"


def messages() -> Iterator[str]:
    """Yield every field with its number and type, and every call of the services."""
    file = wire_pb2.DESCRIPTOR
    pending = list(file.message_types_by_name.values())
    while pending:
        message = pending.pop(0)
        pending += message.nested_types
        for field in message.fields:
            kind = field.message_type or field.enum_type
            name = (
                kind.full_name
                if kind
                else FieldDescriptorProto.Type.Name(cast(Any, field.type)).removeprefix("TYPE_").lower()
            )
            many = " repeated" if field.is_repeated else ""
            yield f"{message.full_name}.{field.name} = {field.number}: {name}{many}"
    for enum in file.enum_types_by_name.values():
        yield from (f"{enum.full_name}.{value.name} = {value.number}" for value in enum.values)
    for service in file.services_by_name.values():
        for method in service.methods:
            yield f"{service.full_name}/{method.name}: {method.input_type.full_name} -> {method.output_type.full_name}"


def error_codes() -> Iterator[str]:
    pending = [errors.WaltzError]
    while pending:
        kind = pending.pop()
        pending += kind.__subclasses__()
        if kind.__module__.startswith(errors.__name__):
            yield f"{kind.code} {kind.__name__}: exit {kind.exit_code}, {kind.status}, retry {kind.retry.value}"


def commands() -> Iterator[str]:
    """Yield every command of `waltzctl` with the names of its options and arguments."""

    def walk(command: Any, words: tuple[str, ...]) -> Iterator[str]:
        context = typer.Context(command, info_name=words[-1] if words else "waltzctl")
        names = command.list_commands(context) if hasattr(command, "list_commands") else []
        for name in names:
            yield from walk(command.get_command(context, name), (*words, name))
        if not names:
            options = [one for given in command.params for one in sorted([*given.opts, *given.secondary_opts])]
            yield " ".join(words) + ": " + " ".join(options)

    return walk(main.cli, ())


PAGES: dict[str, Callable[[], Iterator[str]]] = {
    "messages.txt": messages,
    "errors.txt": error_codes,
    "commands.txt": commands,
}


def page(name: str) -> str:
    return "".join(f"{line}\n" for line in sorted(PAGES[name]()))


@pytest.mark.parametrize("name", PAGES)
def test_what_other_programs_rely_on_is_as_it_was(name: str) -> None:
    assert page(name) == (FOLDER / name).read_text(encoding="utf-8")


if __name__ == "__main__":
    for name in PAGES:
        (FOLDER / name).write_text(page(name), encoding="utf-8")

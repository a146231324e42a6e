"""The schemas of `-o json`: as they are generated, true of every pinned answer, and able to refuse."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from tests.command_page import commands
from tests.json_schemas import RECORD, SCHEMAS, check, faults, published, schemas, text
from waltzctl.main import cli, run

FOUND: dict[str, Any] = json.loads(SCHEMAS.read_text(encoding="utf-8"))


def test_the_file_is_as_it_is_generated() -> None:
    assert SCHEMAS.read_text(encoding="utf-8") == text(), "run ./dev generate"
    assert len(FOUND) >= 50


def test_every_command_that_prints_json_has_a_schema() -> None:
    printing = [
        one.words.removeprefix("waltzctl ")
        for one in commands(cli, "waltzctl")
        for option in one.command.params
        if "--output" in option.opts and "json" in option.type.choices
    ]
    assert sorted(FOUND) == sorted(printing)
    for schema in FOUND.values():
        Draft202012Validator.check_schema(schema)


def test_an_answer_that_is_in_no_schema_fails_the_test_that_runs_the_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(RECORD, raising=False)
    assert run(["errors", "lookup", "W2053", "-o", "json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    check("errors lookup", answer)
    for wrong in ({**answer, "colour": 1}, {**answer, "errors": [{**answer["errors"][0], "code": 7}]}):
        with pytest.raises(AssertionError, match=r"errors lookup: \['\.(colour|errors)"):
            check("errors lookup", wrong)
    monkeypatch.setitem(published(), "errors lookup", {"type": "object", "properties": {}})
    for form in ("json", "table"):
        with pytest.raises(AssertionError, match=r"\.version is in no schema"):
            run(["errors", "lookup", "W2053", "-o", form])


def test_a_schema_says_what_the_shapes_say() -> None:
    shapes = ("version number", "rows[].name text", "rows[].error null", "rows[].error text", "by.{} bool", "x null")
    schema = schemas("".join(f"status: .{shape}\n" for shape in shapes))["status"]
    assert (schema["type"], schema["required"]) == ("object", ["version"])
    assert schema["properties"] == {
        "by": {"additionalProperties": {"type": ["boolean", "null"]}, "type": ["null", "object"]},
        "rows": {
            "items": {
                "properties": {"error": {"type": ["null", "string"]}, "name": {"type": ["null", "string"]}},
                "type": ["null", "object"],
            },
            "type": ["array", "null"],
        },
        "version": {"const": 1},
        "x": {},
    }
    good = {"version": 1, "rows": [{"name": "n", "error": None}], "by": {"7": True}, "x": [1]}
    assert list(faults(schema, good)) == []
    assert list(faults(schema, {"version": 2, "rows": {}, "by": {"7": 1}})) == [
        ".version is 2, and not 1", ".rows is {}, and not array or null", ".by.7 is 1, and not boolean or null",
    ]  # fmt: skip

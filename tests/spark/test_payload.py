"""Decoders: each payload gives its columns or a reason, whatever it is in one batch with, and stays where it was."""

from __future__ import annotations

import json
import math
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from waltz_spark.log.arrow import SCHEMA
from waltz_spark.payloads.decoders import ERROR_COLUMN, Decoder, Method, Sieve, Undecodable, decoder_of
from waltz_spark.table.columns import record_batch

from waltzd.errors.operations import BadDecoder, PathMissing
from waltzd.format.record import encode_payloads


def decoded(decoder: Decoder, payloads: list[bytes]) -> list[dict[str, Any]]:
    """The decoder's columns; that everything else is as it was is checked here."""
    batch = record_batch(encode_payloads(10, payloads), 2)
    found = pickle.loads(pickle.dumps(decoder)).decode(batch)  # noqa: S301 - as it gets to an executor
    found.validate(full=True)
    assert found.schema == decoder.schema(SCHEMA)
    assert found.select(SCHEMA.names) == batch
    assert found.schema.names[-1] == ERROR_COLUMN
    return list(found.select(decoder.columns.names).to_pylist())


def values(rows: list[dict[str, Any]], name: str) -> list[Any]:
    return [row[name] for row in rows]


def errors(rows: list[dict[str, Any]]) -> list[bool]:
    return [row[ERROR_COLUMN] is not None for row in rows]


# -- plain -------------------------------------------------------------------------------------------------------------


def test_text_is_utf_8_or_an_error() -> None:
    rows = decoded(decoder_of("text"), [b"one", b"\xff", "zw\u00f6lf".encode(), b"", b"\xc3"])
    assert values(rows, "text") == ["one", None, "zwölf", "", None]
    assert values(rows, ERROR_COLUMN) == [None, "it is not UTF-8", None, None, "it is not UTF-8"]


def test_binary_adds_nothing() -> None:
    assert decoder_of("binary").columns.names == [ERROR_COLUMN]
    assert errors(decoded(decoder_of("binary"), [b"\xff", b""])) == [False, False]


def test_no_payloads() -> None:
    for text in ("text", "binary", "json:a bigint"):
        assert decoded(decoder_of(text), []) == []


# -- JSON --------------------------------------------------------------------------------------------------------------

_BAD_JSON = [
    b"", b" ", b"null", b"1", b"[]", b'"x"', b"{", b"}", b"{}{}", b'{"a":1}{"a":2}', b'{"a":1} x', b'{"a":1}x}', b"\xff",
    b'{"a":1.5}', b'{"a":"1"}', b'{"a":1,"a":2}', b'{"a":99999999999999999999}', b'{"s":"\xff"}', b'{"s":5}', b'{"s":"\n"}',
    b'{"a":1}\x00', b'{"a":1}\x00{"a":2}', b'{"a":1}\n{"a":2}', b'{"a":1', b'{"a":[1]}', b"{'a':1}", b"{a:1}", b'{"a":1,}',
]  # fmt: skip
_GOOD_JSON = [
    (b'{"a":1,"s":"x"}', (1, "x")),
    (b"{}", (None, None)),
    (b'{"a":null,"s":""}', (None, "")),
    (b' {\n"a" : -9223372036854775808 }\r\n', (-(2**63), None)),
    (b'{"b":{"a":7},"s":"\\u0000\\n\\ud83d\\ude00","t":[{"s":1}]}', (None, "\0\n😀")),
    (b'{"s":"} {"}', (None, "} {")),
]  # fmt: skip


@given(picks=st.lists(st.integers(0, len(_BAD_JSON) + 3 * len(_GOOD_JSON) - 1), min_size=1, max_size=40))
def test_json_depends_on_nothing_but_the_payload(picks: list[int]) -> None:
    decoder = decoder_of("json:a bigint, s string")
    payloads: list[bytes] = []
    expected: list[tuple[int | None, str | None, bool]] = []
    for pick in picks:
        if pick < len(_BAD_JSON):
            payloads.append(_BAD_JSON[pick])
            expected.append((None, None, True))
        else:
            payload, (a, s) = _GOOD_JSON[(pick - len(_BAD_JSON)) // 3]
            payloads.append(payload)
            expected.append((a, s, False))
    rows = decoded(decoder, payloads)
    assert [(row["a"], row["s"], row[ERROR_COLUMN] is not None) for row in rows] == expected


@given(
    rows=st.lists(
        st.fixed_dictionaries(
            {},
            optional={
                "i": st.integers(-(2**31), 2**31 - 1), "l": st.integers(-(2**63), 2**63 - 1), "b": st.booleans(),
                "d": st.floats(allow_nan=False, allow_infinity=False), "s": st.text(), "extra": st.lists(st.text()),
            },
        )
    ),
    indent=st.sampled_from([None, 1]),
    is_ascii=st.booleans(),
)  # fmt: skip
def test_json_agrees_with_the_json_of_python(rows: list[dict[str, Any]], indent: int | None, is_ascii: bool) -> None:
    decoder = decoder_of("json:`i` int, l: bigint, b boolean, d double, s string")
    found = decoded(
        decoder, [json.dumps(row, indent=indent, ensure_ascii=is_ascii).encode(errors="surrogatepass") for row in rows]
    )
    assert errors(found) == [False] * len(rows)
    for was, now in zip(rows, found, strict=True):
        for name in "ilbs":
            assert now[name] == was.get(name)
        assert now["d"] == was.get("d") or math.isclose(now["d"], was["d"], rel_tol=1e-15)


_BYTES = st.one_of(
    st.binary(max_size=6), st.text(max_size=4).map(str.encode), st.sampled_from(_BAD_JSON),
    st.integers(0, 0xFFFF).map(lambda code: bytes([0xE0 | code >> 12, 128 | code >> 6 & 63, 128 | code & 63])),
    st.integers(0, 0x1FFFFF).map(lambda code: bytes([0xF0 | code >> 18, *(128 | code >> by & 63 for by in (12, 6, 0))])),
)  # fmt: skip


@given(payloads=st.lists(_BYTES, min_size=1, max_size=20))
def test_what_is_refused_at_a_glance_is_refused_alone_for_the_same_reason(payloads: list[bytes]) -> None:
    column = pa.array(payloads, pa.binary())
    for method in (decoder_of("text").method, decoder_of("json:a bigint, s string").method):
        assert isinstance(method, Sieve)
        for number, reason in enumerate(method.refused(column).to_pylist()):
            alone = why_not(method, column.slice(number, 1))
            assert reason == (alone if alone in ("it is not UTF-8", "it is not a JSON object") else None)


def why_not(method: Method, payloads: pa.Array) -> str:
    try:
        method.parse(payloads)
    except (Undecodable, pa.ArrowException) as error:
        return str(error)
    return ""


def test_json_types() -> None:
    decoder = decoder_of("json:d decimal(10,2), t timestamp, f float, n smallint, big decimal")
    rows = decoded(
        decoder, [b'{"d":1.25,"t":"2026-01-02T03:04:05.5Z","f":0.5,"n":-3,"big":7}', b'{"d":1.255}', b'{"n":70000}']
    )
    assert (str(rows[0]["d"]), rows[0]["t"].isoformat(), rows[0]["f"]) == ("1.25", "2026-01-02T03:04:05.500000+00:00", 0.5)
    assert (rows[0]["n"], rows[0]["big"]) == (-3, 7)
    assert errors(rows) == [False, True, True]


def test_a_name_that_the_log_has_already_gets_a_prefix() -> None:
    decoder = decoder_of("json:header bigint, DATA string, x int")
    assert decoder.columns.names == ["payload_header", "payload_DATA", "x", ERROR_COLUMN]
    assert decoded(decoder, [b'{"header":5,"DATA":"d","x":1}'])[0]["payload_header"] == 5


def test_a_json_schema(tmp_path: Path) -> None:
    path = tmp_path / "order.json"
    properties = {
        "id": {"type": "integer"}, "name": {"type": ["string", "null"]}, "lines": {"type": "array"},
        "at": {"type": "string", "format": "date-time"}, "paid": {"type": "boolean"}, "sum": {"type": "number"},
    }  # fmt: skip
    path.write_text(json.dumps({"type": "object", "properties": properties}))
    decoder = decoder_of(f"json:{path}")
    assert decoder.columns.names == ["id", "name", "at", "paid", "sum", ERROR_COLUMN]
    before = decoder.fingerprint
    assert decoder_of(f"json:{path}").fingerprint == before
    properties["paid"] = {"type": "string"}
    path.write_text(json.dumps({"properties": properties}))
    assert decoder_of(f"json:{path}").fingerprint != before


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "there is no decoder"),
        ("xml:x", "there is no decoder 'xml:x'|No module named 'xml:x'|has no function x"),
        ("text:utf-8", "text takes no argument"),
        ("json:", "json needs the columns"),
        ("json:a", "'a' is no column"),
        ("json:a bigint,", "'' is no column"),
        ("json:a blob", "no type 'blob' for a"),
        ("json:a int(3)", "no type"),
        ("json:a decimal(40,2)", "1 to 38 digits"),
        ("json:a int, a string", "names a twice"),
        ("json:a int, A string", "two columns A"),
        ("avro:x", "--decode avro was removed"),
        ("protobuf:x", "--decode protobuf was removed"),
        ("cells:text", "--decode cells was removed"),
        ("no_such_module:f", "No module named 'no_such_module'"),
        ("json:nothing", "'nothing' is no column"),
        ("math:no_such", "math has no function no_such"),
        ("math:floor", "failed on an empty array"),
        ("os.path:sep", "has no function sep"),
        ("builtins:len", "it returned int"),
    ],
)
def test_what_is_no_decoder(text: str, words: str) -> None:
    with pytest.raises(BadDecoder, match=words):
        decoder_of(text)


def test_a_schema_that_is_not_there_or_is_none(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    with pytest.raises(PathMissing, match=r"s\.json"):
        decoder_of(f"json:{path}")
    for content in (
        "{",
        "[]",
        '{"properties": 3}',
        '{"properties": {}}',
        '{"properties": {"a": {"type": "array"}}}',
        "[" * 99999,
    ):
        path.write_text(content)
        with pytest.raises(BadDecoder, match=r"s\.json"):
            decoder_of(f"json:{path}")


# -- a function --------------------------------------------------------------------------------------------------------

_MODULE = """
import pyarrow as pa
import pyarrow.compute as pc

def lengths(payloads):
    return pa.RecordBatch.from_arrays([pc.binary_length(payloads)], names=["length"])

def words(payloads):
    rows = [dict(zip(("verb", "rest"), payload.decode().split(" ", 1), strict=True)) for payload in payloads.to_pylist()]
    return pa.array(rows, pa.struct([("verb", pa.string()), ("rest", pa.string())]))

def fewer(payloads):
    return lengths(payloads.slice(0, len(payloads) // 2))

def moody(payloads):
    kind = pa.int64() if len(payloads) else pa.string()
    return pa.RecordBatch.from_arrays([pa.nulls(len(payloads), kind)], names=["x"])
"""


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = tmp_path / "functions_of_a_test.py"
    path.write_text(_MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield path
    sys.modules.pop("functions_of_a_test", None)


@pytest.mark.usefixtures("functions")
def test_a_function_of_the_user() -> None:
    assert values(decoded(decoder_of("functions_of_a_test:lengths"), [b"", b"abc"]), "length") == [0, 3]
    rows = decoded(decoder_of("functions_of_a_test:words"), [b"put x y", b"put", b"\xff x", b"get z"])
    assert values(rows, "verb") == ["put", None, None, "get"]
    assert values(rows, "rest") == ["x y", None, None, "z"]
    assert [error and error.partition(":")[0] for error in values(rows, ERROR_COLUMN)] == [
        None, "ValueError", "UnicodeDecodeError", None,
    ]  # fmt: skip


@pytest.mark.usefixtures("functions")
def test_a_function_that_does_not_do_what_it_has_to() -> None:
    rows = decoded(decoder_of("functions_of_a_test:fewer"), [b"a", b"b"])
    assert values(rows, ERROR_COLUMN) == ["functions_of_a_test:fewer made 0 rows of 1 payloads"] * 2
    rows = decoded(decoder_of("functions_of_a_test:moody"), [b"a"])
    assert values(rows, ERROR_COLUMN) == ["functions_of_a_test:moody made the columns x int64"]


def test_a_changed_function_has_another_fingerprint(functions: Path) -> None:
    before = decoder_of("functions_of_a_test:lengths")
    assert decoder_of("functions_of_a_test:lengths").fingerprint == before.fingerprint
    assert decoder_of("functions_of_a_test:words").fingerprint != before.fingerprint
    functions.write_text(_MODULE + "\n# another one\n")
    assert decoder_of("functions_of_a_test:lengths").fingerprint != before.fingerprint


def test_fingerprints_tell_decoders_apart() -> None:
    texts = ["text", "binary", "json:a int", "json:a bigint", "json:b int", "json:a int, b int"]
    assert len({decoder_of(text).fingerprint for text in texts}) == len(texts)
    assert decoder_of("json:a int").fingerprint == decoder_of("json: a  INT ").fingerprint


def test_reasons_are_short() -> None:
    rows = decoded(decoder_of("json:a bigint"), [b'{"a":' + b"9" * 100_000 + b"}"])
    assert len(rows[0][ERROR_COLUMN]) <= 300


def test_nesting_without_end_is_no_crash() -> None:
    deep = b'{"x":' + b"[" * 200_000 + b"]" * 200_000 + b',"a":1}'
    assert decoded(decoder_of("json:a bigint"), [deep, b'{"a":2}'])[1]["a"] == 2


def test_a_batch_that_is_a_slice() -> None:
    batch = record_batch(encode_payloads(0, [b'{"a":%d}' % n for n in range(10)]), 0).slice(4, 3)
    assert decoder_of("json:a bigint").decode(batch).column("a") == pa.array([4, 5, 6])

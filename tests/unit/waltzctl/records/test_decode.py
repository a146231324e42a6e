"""What payloads are taken for, and which of them a filter means."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from waltzctl.records.decode import HOW, Decoded, Filters, JsonPath, decoded, line, pattern_of
from waltzd.errors import BadArgument


@pytest.mark.parametrize(
    ("payload", "how", "found"),
    [
        (b'{"a": [1, 2.5]}', "auto", Decoded("json", {"a": [1, 2.5]})),
        (b"[]", "auto", Decoded("json", [])),
        (b"17", "auto", Decoded("text", "17")),
        (b"17", "json", Decoded("json", 17)),
        (b"null", "json", Decoded("json", None)),
        (b"1e999", "json", Decoded("text", "1e999")),
        (b'{"a": NaN}', "auto", Decoded("text", '{"a": NaN}')),
        (b"[" * 100_000, "json", Decoded("text", "[" * 100_000)),
        (b'{"a": ', "json", Decoded("text", '{"a": ')),
        ("Tür\n".encode(), "auto", Decoded("text", "Tür\n")),
        (b"", "auto", Decoded("text", "")),
        (b"a\x00", "auto", Decoded("hex", "6100")),
        (b"a\x00", "text", Decoded("text", "a\x00")),
        (b"\xff\xfe", "text", Decoded("hex", "fffe")),
        (b'{"a": 1}', "text", Decoded("text", '{"a": 1}')),
        (b"abc", "hex", Decoded("hex", "616263")),
    ],
)
def test_what_a_payload_is_taken_for(payload: bytes, how: str, found: Decoded) -> None:
    assert decoded(payload, how) == found


@given(st.binary(max_size=40), st.sampled_from(HOW))
def test_whatever_it_is_it_can_be_said_in_json_and_got_back(payload: bytes, how: str) -> None:
    found = decoded(payload, how)
    again = json.loads(json.dumps(found.value, allow_nan=False))
    assert again == found.value
    if found.encoding == "hex":
        assert bytes.fromhex(again) == payload
    elif found.encoding == "text":
        assert again.encode() == payload
    else:
        assert json.loads(payload) == again


@given(st.text(max_size=60).map(str.encode) | st.binary(max_size=60), st.sampled_from(HOW), st.integers(0, 50))
def test_a_line_can_always_be_printed(payload: bytes, how: str, characters: int) -> None:
    text = line(payload, how, characters)
    assert len(text) <= characters
    assert text.isprintable()


def test_a_line_of_json_is_one_line() -> None:
    assert line(b'{\n  "a":\n1, "b": "T\\u00fcr\\n"}', "auto", 80) == '{"a": 1, "b": "Tür\\n"}'
    assert line(b"a\nb\x1b[31m", "text", 80) == "a b.[31m"
    assert line(b"\x00" * 1000, "hex", 4) == "0000"


VALUE = {"order": {"items": [{"sku": 17, "name": "seventeen", "x.y": True}], "paid": False, "note": None, "n": "17"}}


@pytest.mark.parametrize(
    ("path", "is_met"),
    [
        ("order", True),
        ("$.order.items", True),
        ("order.items[0].sku=17", True),
        ("order.items[0].sku=17.0", True),
        ("order.items[0].sku=18", False),
        ('order.items[0].sku="17"', False),
        ("order.n=17", True),
        ('order.n="17"', True),
        ("order.items[1].sku", False),
        ("order.items.sku", False),
        ("order[0]", False),
        ("order.items[0].name=seventeen", True),
        ('order.items[0].name="seventeen"', True),
        ("order.items[0].name=", False),
        ('order.items[0]["x.y"]=true', True),
        ('order.items[0]["x.y"]=1', False),
        ("order.paid=false", True),
        ("order.paid=0", False),
        ("order.note=null", True),
        ("order.note", True),
        ("order.missing", False),
        ('order.items=[{"name":"seventeen","sku":17,"x.y":true}]', True),
        ("order.items[0].name=a=b", False),
        ("$", True),
    ],
)
def test_paths(path: str, is_met: bool) -> None:
    assert JsonPath.parse(path).matches(VALUE) is is_met


@pytest.mark.parametrize(
    "path", ["", ".a", "a..b", "a[", "a[x]", "a[-1]", "a]b", 'a["', '["a"]b', "=x", "a.", "$a[", "a[99999999999]"]
)
def test_what_is_no_path(path: str) -> None:
    with pytest.raises(BadArgument, match="--json-path"):
        JsonPath.parse(path)


@pytest.mark.parametrize(
    ("filters", "is_met"),
    [
        ({}, True),
        ({"kind": 7}, True),
        ({"kind": 8}, False),
        ({"client": 3}, True),
        ({"client": 3, "kind": 0}, False),
        ({"pattern": pattern_of("s[e]v")}, True),
        ({"pattern": pattern_of("^s")}, False),
        ({"paths": (JsonPath.parse("order.n"), JsonPath.parse("order.paid"))}, True),
        ({"paths": (JsonPath.parse("order.n"), JsonPath.parse("order.m"))}, False),
        ({"kind": 7, "client": 3, "pattern": pattern_of("17"), "paths": (JsonPath.parse("order.n=17"),)}, True),
    ],
)
def test_all_of_a_filter_must_hold(filters: dict[str, Any], is_met: bool) -> None:
    assert Filters(**filters).match(7, 3, json.dumps(VALUE).encode()) is is_met


def test_a_pattern_finds_text_in_any_bytes_and_a_path_nothing() -> None:
    assert Filters(pattern=pattern_of("ü.$")).match(0, 0, b"\xff\xfe\xc3\xbcx")
    assert not Filters(paths=(JsonPath.parse("$"),)).match(0, 0, b"\xff")


@pytest.mark.parametrize("text", ["(", "[a", "*", "a{99999999999}"])
def test_what_is_no_pattern(text: str) -> None:
    with pytest.raises(BadArgument, match="--match"):
        pattern_of(text)

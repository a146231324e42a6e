"""Files of settings: read as Java reads them, and written so that Java reads what was meant."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from waltz_spark.engine.properties import BadLine, encode, parse, secret_names, trimmed

FILE = r"""
# a comment
! another one
spark.a value
spark.b=value
spark.c:value
  spark.d   =   value with = and # in it
spark.e
spark.f a,\
        b,\
   c
spark.g C:\\Users\tab
spark.h\ with\=odd\:name 1
spark.i \u00e9
spark.b second
"""


def test_what_a_file_says() -> None:
    assert parse(FILE) == {
        "spark.a": "value",
        "spark.b": "second",
        "spark.c": "value",
        "spark.d": "value with = and # in it",
        "spark.e": "",
        "spark.f": "a,b,c",
        "spark.g": "C:\\Users\tab",
        "spark.h with=odd:name": "1",
        "spark.i": "é",
    }


def test_lines_end_in_three_ways() -> None:
    assert parse("spark.a 1\r\nspark.b 2\rspark.c 3\\") == {"spark.a": "1", "spark.b": "2", "spark.c": "3"}


def test_half_a_letter() -> None:
    with pytest.raises(BadLine, match="four hexadecimal digits"):
        parse(r"spark.a \u12")


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)


@given(st.dictionaries(TEXTS, TEXTS.map(trimmed)))
def test_what_is_written_is_read(settings: dict[str, str]) -> None:
    assert parse(encode(settings)) == settings


def test_names_of_secrets() -> None:
    found = secret_names({
        "spark.hadoop.fs.s3a.secret.key": "x", "spark.my.Password": "x", "spark.x.token": "x", "spark.empty.token": "",
        "spark.executor.memory": "token", "spark.executor.cores": "1",
    })  # fmt: skip
    assert found == ["spark.hadoop.fs.s3a.secret.key", "spark.my.Password", "spark.x.token"]

"""What is known of SQL without Spark: where an expression ends, and whether the log is still in the files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from waltz_spark.exporting.form import KINDS, form_of
from waltz_spark.exporting.manifest import ARROW, SPARK, Manifest, Query, items_of
from waltz_spark.exporting.options import Wish, query_of, shape_of
from waltz_spark.exporting.spark_form import PART, conf_for, options_of
from waltz_spark.log.decode import SCHEMA

from tests.spark.growing import GrowingStorage
from tests.spark.test_manifest import SHAPE, manifest_of
from waltzctl.main import run
from waltzd.errors import BadArgument, BadDecoder, BadSql

PARQUET = form_of("parquet", None)


@pytest.mark.parametrize(
    ("text", "items"),
    [
        ("*", ["*"]),
        ("txid, data", ["txid", "data"]),
        ("a, f(b, 'x,y') AS d, m[1, 2]", ["a", "f(b, 'x,y') AS d", "m[1, 2]"]),
        ("'it''s, ok', b", ["'it''s, ok'", "b"]),
        (r"'it\'s, ok', b", [r"'it\'s, ok'", "b"]),
        (r"r'raw\', b", [r"r'raw\'", "b"]),
        (r"header'\', b'", [r"header'\', b'"]),
        ("`a,b` c, d", ["`a,b` c", "d"]),
        ("a -- , b\n, c", ["a -- , b", "c"]),
        ("a /* , ' */, b", ["a /* , ' */", "b"]),
        ("a < b, c > d, a - b, a / b", ["a < b", "c > d", "a - b", "a / b"]),
    ],
)
def test_where_an_expression_ends(text: str, items: list[str]) -> None:
    assert list(items_of(text)) == items


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a,", "nothing before or after one of its commas"),
        (",a", "nothing before or after"),
        ("a,,b", "nothing before or after"),
        ("f(a", "a parenthesis is not closed"),
        ("a), f(b", r"the \) at character 2 closes nothing"),
        ("a, 'b", "the ' at character 4 is not closed"),
        ("a, `b", "the ` at character 4 is not closed"),
        ("a /* b", "a comment is not closed"),
        (r"'a\'", "the ' at character 1 is not closed"),
    ],
)
def test_lists_that_are_none(text: str, said: str) -> None:
    with pytest.raises(BadSql, match=said):
        items_of(text)


ITEM = st.sampled_from(["a", "*", "f(a, b)", "'x, y'", "`q,r` AS s", "a[1]", "CASE WHEN a THEN (1, 2) END", "- 1", "r'\\'"])


@given(st.lists(ITEM, min_size=1, max_size=6))
def test_what_was_joined_comes_apart(items: list[str]) -> None:
    assert list(items_of(" , ".join(items))) == items


EACH = ", ".join(SCHEMA.names)


@pytest.mark.parametrize(
    ("select", "where", "is_kept"),
    [
        ("", "", True),
        ("*", "", True),
        ("*, length(data) AS size", "", True),
        (EACH, "", True),
        (EACH.upper().replace("DATA", "`data`"), "", True),
        (f"{EACH}, upper(s) AS t", "", True),
        ("", "txid >= 0", False),
        ("* EXCEPT (data)", "", False),
        ("a.*", "", False),
        (EACH.replace("data", "upper(data) AS data"), "", False),
        (EACH.replace("crc, ", ""), "", False),
        (EACH.replace("data", "'data'"), "", False),
        ("'*'", "", False),
        ("f(*)", "", False),
    ],
)
def test_whether_the_log_is_in_the_files(select: str, where: str, *, is_kept: bool) -> None:
    assert Query(engine=SPARK, select=select, where=where).keeps_records is is_kept


# -- what was asked ----------------------------------------------------------------------------------------------------


def asked(
    before: Query | None = None, *, is_lossless: bool = False, engine: Literal["arrow", "spark"] | None = None,
    select: str | None = None, where: str | None = None,
) -> Query:  # fmt: skip
    wish = Wish(engine=engine, select=select, where=where)
    there: Manifest | None = None
    if before is not None:
        there = replace(manifest_of(), shape=replace(SHAPE, query=before))
    return query_of(wish, there, PARQUET, is_lossless=is_lossless)


def test_who_writes() -> None:
    part = Query(engine=SPARK, select="txid", where="header = 1")
    assert asked() == asked(engine="arrow") == asked(select=" ", where="") == Query(engine=ARROW)
    assert asked(engine="spark") == Query(engine=SPARK)
    assert asked(select=" txid ", where="header = 1") == part
    assert asked(part, select=part.select, where=part.where) == part
    assert asked(Query(engine=SPARK)) == Query(engine=SPARK)
    assert asked(part, select="txid", where="") == Query(engine=SPARK, select="txid"), "then refused as another one"


@pytest.mark.parametrize(
    ("decoder", "is_taken"),
    [
        ("json:a bigint", True),
        ("cells:text", True),
        ("", True),
        ("waltz_no_such:decode", False),
        ("cells:waltz_no_such:decode", False),
        ("cells:cells:waltz_no_such:decode", False),
    ],
)
def test_what_runs_code_comes_from_the_command_line_only(decoder: str, *, is_taken: bool) -> None:
    """Whoever may write into the folder of an export says nothing there that the next run calls."""
    before = replace(manifest_of(), shape=replace(SHAPE, decoder=decoder, lossless=False))
    if is_taken:
        found = shape_of(Wish(), before)[1]
        assert decoder == ("" if found is None else found.text)
    else:
        with pytest.raises(BadArgument, match="which runs code, and the command does not say so"):
            shape_of(Wish(), before)
        with pytest.raises(BadDecoder, match="No module named 'waltz_no_such'"):
            shape_of(Wish(decode="waltz_no_such:decode"), before)
    for said in ({"select": "txid"}, {"where": "java_method('java.lang.System', 'exit', 1) = 1"}):
        with pytest.raises(BadArgument, match=f"--{next(iter(said))} .* which runs code"):
            asked(Query(engine=SPARK, **said))


@pytest.mark.parametrize(
    ("said", "is_lossless", "message"),
    [
        ({"engine": "arrow", "where": "txid > 1"}, False, "--where is for Spark to compute"),
        ({"engine": "arrow", "select": "txid"}, False, "--select is for Spark to compute"),
        ({"select": "txid"}, True, "--lossless.* does not go with --select"),
        ({"engine": "spark"}, True, "--lossless.* does not go with --engine spark"),
    ],
)
def test_what_does_not_go_together(said: dict[str, Any], message: str, *, is_lossless: bool) -> None:
    with pytest.raises(BadArgument, match=message):
        asked(is_lossless=is_lossless, engine=said.get("engine"), select=said.get("select"), where=said.get("where"))


def test_a_list_that_is_none_is_found_without_spark() -> None:
    with pytest.raises(BadSql):
        asked(select="f(a")


# -- what Spark's writers can do ---------------------------------------------------------------------------------------

LACKING = {("json", "zstd"), ("csv", "zstd")}


@pytest.mark.parametrize(("format_", "codec"), [(name, codec) for name, kind in KINDS.items() for codec in kind.codecs])
def test_every_compression_has_its_name_or_is_refused(format_: str, codec: str) -> None:
    form = form_of(format_, codec)
    if format_ == "delta" or (format_, codec) in LACKING:
        with pytest.raises(BadArgument, match=r"[Ss]park"):
            options_of(form)
        return
    options = options_of(form)
    names = {"lz4": "lz4_raw", "none": "uncompressed"} if format_ == "parquet" else {}
    assert options["compression"] == names.get(form.codec, form.codec)
    assert options["maxRecordsPerFile"] == "0"


def test_levels_that_nobody_would_keep_are_refused() -> None:
    with pytest.raises(BadArgument, match="has no such level"):
        options_of(form_of("parquet", "gzip:9"))
    assert options_of(form_of("parquet", "zstd:9"))["parquet.compression.codec.zstd.level"] == "9"


def test_a_session_is_as_the_user_says() -> None:
    assert conf_for({})["spark.sql.session.timeZone"] == "UTC"
    assert conf_for({"spark.driver.memory": "9g"})["spark.driver.memory"] == "9g"


def test_which_task_wrote_a_file() -> None:
    found = PART.fullmatch("part-00012-587c0b3d-7e24-4ba1-9e1c-8c4a9535be38-c000.zstd.parquet")
    assert found is not None
    assert int(found[1]) == 12
    assert PART.fullmatch("part-00012-587c0b3d-7e24-4ba1-9e1c-8c4a9535be38-c001.zstd.parquet") is None


# -- as it is typed ----------------------------------------------------------------------------------------------------


@pytest.fixture
def source(tmp_path: Path) -> Path:
    storage = GrowingStorage(tmp_path / "storage", key=UUID(int=77), partitions=1, assigned=(0,))
    storage.append(0, [b"a", b"b"])
    return storage.directory


def test_a_dry_run_says_that_it_did_not_check_the_sql(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    line = ["spark-export", str(out), "--source", str(source), "--dry-run"]
    assert run([*line, "--where", "nonsense("]) == 0
    assert "The SQL was not checked" in capsys.readouterr().err
    assert run(line) == 0
    assert "The SQL" not in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--where", "txid > 1", "--engine", "arrow"], "W1001 --where is for Spark to compute"),
        (["--select", "txid,"], "W2206 --select txid,: there is nothing before or after one of its commas"),
        (["--select", "txid", "--lossless"], "W1001 --lossless keeps records and segments as they are"),
        (["--engine", "spark", "--format", "delta"], "W1001 --format delta is not for --engine spark"),
        (
            ["--engine", "spark", "--format", "json", "--compression", "zstd"],
            "W1001 --compression zstd: Spark's writer of json",
        ),
    ],
)
def test_what_is_refused_before_java(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    out = tmp_path / "out"
    assert run(["spark-export", str(out), "--source", str(source), *options]) == 2
    assert capsys.readouterr().err.startswith(said)
    assert not out.exists()

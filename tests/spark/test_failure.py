"""What a task raised arrives as what it was."""

from __future__ import annotations

import traceback

import pytest
from waltz_spark.engine.session import raised_by_us, summary, told
from waltz_spark.table.reading import telling

from waltzd.errors import BadDecoder, LogUnreadable, PartitionDamaged, SparkFailed, WaltzError


def traceback_of(error: Exception, cause: Exception | None = None) -> str:
    """As Spark hands it over: the traceback, and below it what Java has to say."""
    try:
        with telling():
            raise error from cause
    except type(error) as caught:
        lines = traceback.format_exception(caught)
    java = "\n\tat org.apache.spark.api.python.BasePythonRunner.handlePythonException(PythonRunner.scala:583)\n"
    return f"An exception was thrown from the Python worker:\n{''.join(lines)}{java}Caused by: java.io.EOFException"


@pytest.mark.parametrize(
    "error",
    [
        PartitionDamaged("/log/2/0.seg: bytes 8943 to 9157 are not the record of id 41"),
        LogUnreadable("ids 4 to 7: nobody gave them", not_done="no row from id 4 on", next_step="bring storages back"),
        LogUnreadable("of several\nlines: as what a server said", next_step="look"),
    ],
)
def test_an_error_of_ours_comes_out_with_all_its_parts(error: WaltzError) -> None:
    found = raised_by_us(traceback_of(error))
    assert found is not None
    assert (type(found), found.message) == (type(error), error.message.replace("\n", " "))
    assert found.lines()[1:] == error.lines()[1:]


def test_the_error_that_was_raised_counts_and_not_what_caused_it() -> None:
    found = raised_by_us(traceback_of(BadDecoder("it cannot be decoded"), PartitionDamaged("the cause")))
    assert isinstance(found, BadDecoder)


def test_what_is_not_ours_is_told_by_its_last_line() -> None:
    text = traceback_of(ValueError("seven is no color"))
    assert raised_by_us(text) is None
    assert summary(text) == "ValueError: seven is no color"
    failed = told(RuntimeError(text), "/cache/x.log")
    assert type(failed) is SparkFailed
    assert failed.message == "Spark failed: ValueError: seven is no color. All that it said is in /cache/x.log"


def test_what_java_says_is_told_by_the_first_line_that_is_an_error() -> None:
    assert summary("\nsomething\njava.lang.OutOfMemoryError: heap\nmore") == "java.lang.OutOfMemoryError: heap"
    assert summary("only words") == "only words"
    assert summary("") == ""


def test_a_name_that_is_no_error_of_ours_is_not_taken_for_one() -> None:
    assert raised_by_us("waltzd.errors.Nonsense: x") is None

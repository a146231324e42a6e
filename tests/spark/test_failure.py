"""What Spark says of a failure, in one line."""

from __future__ import annotations

import traceback

from waltz_spark.engine.session import spark_error, summary
from waltz_spark.table.read_task import explained_errors

from waltzd.errors.operations import SparkFailed


def traceback_of(error: Exception, cause: Exception | None = None) -> str:
    """As Spark hands it over: the traceback, and below it what Java has to say."""
    try:
        with explained_errors():
            raise error from cause
    except type(error) as caught:
        lines = traceback.format_exception(caught)
    java = "\n\tat org.apache.spark.api.python.BasePythonRunner.handlePythonException(PythonRunner.scala:583)\n"
    return f"An exception was thrown from the Python worker:\n{''.join(lines)}{java}Caused by: java.io.EOFException"


def test_what_is_not_ours_is_told_by_its_last_line() -> None:
    text = traceback_of(ValueError("seven is no color"))
    assert summary(text) == "ValueError: seven is no color"
    failed = spark_error(RuntimeError(text), "/cache/x.log")
    assert type(failed) is SparkFailed
    assert failed.message == "Spark failed: ValueError: seven is no color. All that it said is in /cache/x.log"


def test_what_java_says_is_told_by_the_first_line_that_is_an_error() -> None:
    assert summary("\nsomething\njava.lang.OutOfMemoryError: heap\nmore") == "java.lang.OutOfMemoryError: heap"
    assert summary("only words") == "only words"
    assert summary("") == ""

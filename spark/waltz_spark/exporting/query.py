"""What SQL makes of a log on its way into files: which records, which columns, and who writes them.

The SQL is Spark's, and what it means only Spark can say. What is decided here needs no Spark: where one expression of a
list ends, and whether the files still hold the records as the log has them, so that records can be made of rows again.
Where that is not certain, the answer is no. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from waltz_spark.log.decode import SCHEMA
from waltzd.errors import BadSql

ARROW, SPARK = "arrow", "spark"
ENGINES = (ARROW, SPARK)
_RAW = re.compile(r"\b[rR]$")
"""Before a quote: a backslash means itself in it."""
_OPENING, _CLOSING, _QUOTES = "([{", ")]}", "'\"`"


@dataclass(frozen=True, kw_only=True)
class Query:
    """Empty texts say nothing: all columns, all records."""

    engine: str = ARROW
    select: str = ""
    where: str = ""

    @property
    def items(self) -> tuple[str, ...]:
        """The expressions of the list of columns."""
        return items_of(self.select) if self.select else ("*",)

    @property
    def keeps_records(self) -> bool:
        """Whether all records are in the files, with the nine columns of the log as they are."""
        return not self.where and keeps_columns(self.items)


def keeps_columns(items: tuple[str, ...]) -> bool:
    """Whether the columns of the log are among these as they are. No file has two columns of one name, so a column that is
    here by its bare name is no other one."""
    plain = {_bare(item).lower() for item in items}
    return "*" in plain or plain.issuperset(SCHEMA.names)


def _bare(item: str) -> str:
    is_quoted = len(item) > 2 and item[0] == item[-1] == "`" and item.count("`") == 2
    return item[1:-1] if is_quoted else item


def items_of(text: str) -> tuple[str, ...]:
    """`a, f(b, c) AS d` is two expressions: a comma counts outside of parentheses, quotes and comments."""
    items, start, depth = [], 0, 0
    for at, char in _significant(text):
        depth += (char in _OPENING) - (char in _CLOSING)
        if depth < 0:
            raise BadSql(f"--select {text}: the {char} at character {at + 1} closes nothing")
        if char == "," and depth == 0:
            items.append(text[start:at].strip())
            start = at + 1
    if depth:
        raise BadSql(f"--select {text}: a parenthesis is not closed")
    items.append(text[start:].strip())
    if not all(items):
        raise BadSql(f"--select {text}: there is nothing before or after one of its commas")
    return tuple(items)


def _significant(text: str) -> Iterator[tuple[int, str]]:
    """The characters that are not within quotes and comments, and where they are."""
    at = 0
    while at < len(text):
        char = text[at]
        if char in _QUOTES:
            at = _behind_quote(text, at)
        elif text.startswith("--", at):
            end = text.find("\n", at)
            at = len(text) if end < 0 else end
        elif text.startswith("/*", at):
            end = text.find("*/", at + 2)
            if end < 0:
                raise BadSql(f"--select {text}: a comment is not closed")
            at = end + 2
        else:
            yield at, char
            at += 1


def _behind_quote(text: str, start: int) -> int:
    """A quote ends at the next one of its kind. One that is doubled goes on as the next, which comes to the same."""
    quote = text[start]
    has_escapes = quote != "`" and not _RAW.search(text[:start])
    at = start + 1
    while at < len(text):
        if text[at] == "\\" and has_escapes:
            at += 2
        elif text[at] == quote:
            return at + 1
        else:
            at += 1
    raise BadSql(f"--select {text}: the {quote} at character {start + 1} is not closed")

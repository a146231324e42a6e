"""A process that keeps a view and may be killed: `python -m tests.process.applier URL LAST BATCH [--die-at N]`.

It applies the transactions 0 to LAST of partition 0 from wherever the mark is, to the rows and the total of
`tests.unit.waltzd.sql.test_view`. With `--die-at` it kills itself in front of its n-th statement or commit.
"""

from __future__ import annotations

import os
import signal
import sys

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.engine import Engine

from tests.unit.waltzd.sql.test_view import CLUSTER, TABLES, feed, insert_and_count
from waltzd.errors import DatabaseUnavailable
from waltzd.sql import SqlView, sqlite

ATTEMPTS = 200


def main(url: str, last: int, batch: int, die_at: int) -> None:
    engine = sqlite(url.removeprefix("sqlite:///")) if url.startswith("sqlite:") else sa.create_engine(url)
    if die_at:
        _arm(engine, die_at)
    view = SqlView(engine, insert_and_count, tables=TABLES, batch_max=batch)
    for _ in range(ATTEMPTS):  # as a client does, without its back-off
        try:
            view._prepare(CLUSTER)
            mark = view.read_position(0)
            print(mark, flush=True)
            view.apply_all(feed(mark + 1, last))
            break
        except DatabaseUnavailable as error:
            print(error, file=sys.stderr)
    engine.dispose()


def _arm(engine: Engine, die_at: int) -> None:
    count = 0

    def step(*_: object) -> None:
        nonlocal count
        count += 1
        if count == die_at:
            os.kill(os.getpid(), signal.SIGKILL)

    event.listen(engine, "before_cursor_execute", step)
    event.listen(engine, "commit", step)


if __name__ == "__main__":
    *words, at = sys.argv[1:] if "--die-at" in sys.argv else [*sys.argv[1:], "0"]
    main(words[0], int(words[1]), int(words[2]), int(at))

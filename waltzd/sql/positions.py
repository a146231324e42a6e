"""The tables of a view in its database: its owner, its positions and its dead letters.

A row of `waltz_views` names the cluster and the function that a view belongs to. It is written before the first
position and never changes its cluster. The position of a partition is a row of `waltz_positions`. Raising it from one
id to another succeeds for one process only, and its row is the lock that other processes wait for. The row names the
timelines of the log that its position belongs to (`waltzd.protocol.timelines`); it is raised only for the same
timelines. Nothing here ends a database transaction that it did not begin.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any, NamedTuple
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DBAPIError, IntegrityError

from waltzd.errors import BadArgument, ForeignCluster, OtherView
from waltzd.protocol.positions import Position, lineage_of_text, lineage_text
from waltzd.protocol.quorum import EMPTY
from waltzd.protocol.timelines import Lineage

NAME_MAX, FUNCTION_MAX = 100, 400
REASON_MAX = 2000
_OLDER = "waltz_marks"


class Kept(NamedTuple):
    """Position of a view in a partition, as stored."""

    id: int
    lineage: Lineage
    """Timelines of the log at the time it was stored."""

    @property
    def position(self) -> Position:
        return Position(self.id, self.lineage.current)


class Positions:
    """The positions of one view in one database."""

    def __init__(self, engine: Engine, view: str, *, has_dead_letters: bool) -> None:
        if not view or len(view) > NAME_MAX:
            raise BadArgument(f"the name of a view has 1 to {NAME_MAX} characters, not {len(view)}")
        self._engine = engine
        self._view = view
        self._metadata = sa.MetaData()
        self._views = sa.Table(
            "waltz_views",
            self._metadata,
            sa.Column("view_name", sa.String(NAME_MAX), primary_key=True),
            sa.Column("cluster", sa.String(36), nullable=False),
            sa.Column("function_name", sa.String(FUNCTION_MAX), nullable=False),
        )
        self._positions = sa.Table(
            "waltz_positions",
            self._metadata,
            *key_columns("view_name"),
            sa.Column("position", sa.BigInteger, nullable=False),
            sa.Column("timeline", sa.Text, nullable=True),  # NULL for the first one, as earlier versions wrote
        )
        self._dead: sa.Table | None = None
        if has_dead_letters:
            self._dead = sa.Table(
                "waltz_dead_letters",
                self._metadata,
                *key_columns("view_name"),
                sa.Column("id", sa.BigInteger, primary_key=True, autoincrement=False),
                sa.Column("cluster", sa.String(36), nullable=False),
                sa.Column("kind", sa.Integer, nullable=False),
                sa.Column("reason", sa.Text, nullable=False),
                sa.Column("put_aside", sa.DateTime(timezone=True), nullable=False),
            )

    # -- at the start

    def prepare(self, cluster: UUID, function: str, *, accept_rename: bool) -> None:
        """Create the missing tables, prove that the database can roll back, and claim the name of the view for a
        cluster and function. Raise if another one has it."""
        self._refuse_older()
        create(self._engine, self._metadata)
        add_columns(self._engine, self._positions)
        probe = -2 - secrets.randbelow(1 << 30)
        prove_transactions(self._engine, self._positions, self._insert(probe), self._at(probe))
        self._claim(str(cluster), function[-FUNCTION_MAX:], accept_rename=accept_rename)

    def _refuse_older(self) -> None:
        inspector = sa.inspect(self._engine)
        if inspector.has_table(_OLDER):
            raise OtherView(
                f"the database has a table {_OLDER}, in which an earlier version of Waltz kept the positions of views",
                next_step=f"drop {_OLDER} and empty the application's tables: the view is rebuilt from the log",
            )
        name = "" if self._dead is None else self._dead.name
        if name and inspector.has_table(name) and all(one["name"] != "kind" for one in inspector.get_columns(name)):
            raise OtherView(
                f"the table {name} of an earlier version of Waltz has the column `header` in place of `kind`",
                next_step=f"ALTER TABLE {name} RENAME COLUMN header TO kind",
            )

    def _claim(self, cluster: str, function: str, *, accept_rename: bool) -> None:
        row = {"view_name": self._view, "cluster": cluster, "function_name": function}
        found = claim(self._engine, self._views, row)
        had, made_by = found["cluster"], found["function_name"]
        if had != cluster:
            raise ForeignCluster(
                f"the view {self._view!r} in this database belongs to cluster {had}, and the client to {cluster}",
                not_done="nothing was applied",
                next_step="give the client servers of that cluster, or this view another name and tables of its own",
            )
        if made_by == function:
            return
        if not accept_rename:
            raise OtherView(
                f"the view {self._view!r} in this database belongs to the function {made_by}, not to {function}",
                next_step="give each view a name of its own (`name=`); if the same function was renamed, say "
                "`accept_rename=True`",
            )
        with self._engine.begin() as connection:
            is_ours = self._views.c.view_name == self._view
            connection.execute(sa.update(self._views).where(is_ours).values(function_name=function))

    # -- positions

    def read(self, partition: int) -> Kept | None:
        """Return the position in a partition; None if it has no row yet."""
        columns = self._positions.c
        with self._engine.connect() as connection:
            found = connection.execute(sa.select(columns.position, columns.timeline).where(*self._at(partition))).first()
        return None if found is None else Kept(int(found[0]), lineage_of_text(found[1]))

    def read_all(self) -> dict[int, Kept]:
        columns = self._positions.c
        wanted = sa.select(columns.partition_id, columns.position, columns.timeline)
        with self._engine.connect() as connection:
            rows = connection.execute(wanted.where(columns.view_name == self._view, columns.partition_id >= 0)).all()
        return {int(partition): Kept(int(position), lineage_of_text(text)) for partition, position, text in rows}

    def insert(self, partition: int) -> None:
        try:
            with self._engine.begin() as connection:
                connection.execute(self._insert(partition))
        except IntegrityError:
            return  # another process inserted it first

    def raise_from(self, connection: Connection, partition: int, expected: Kept, position: int) -> bool:
        """Raise a position and return True, if it is the expected one of the expected timelines; else return False."""
        here = self._kept(partition, expected)
        return connection.execute(sa.update(self._positions).where(*here).values(position=position)).rowcount == 1

    def go_over(self, partition: int, before: Kept, lineage: Lineage) -> None:
        """Move a position to other timelines. The caller has checked that the id is the same transaction there. It
        changes nothing if another process was first."""
        with self._engine.begin() as connection:
            here = self._kept(partition, before)
            connection.execute(sa.update(self._positions).where(*here).values(timeline=lineage_text(lineage)))

    def lower(self, connection: Connection, partition: int, id: int) -> bool:
        """Set a position back and delete the dead letters above it; return False if it is lower already."""
        here = (*self._at(partition), self._positions.c.position >= id)
        if connection.execute(sa.update(self._positions).where(*here).values(position=id)).rowcount != 1:
            return False
        if self._dead is not None:
            columns = self._dead.c
            above = columns.view_name == self._view, columns.partition_id == partition, columns.id > id
            connection.execute(sa.delete(self._dead).where(*above))
        return True

    def _kept(self, partition: int, kept: Kept) -> tuple[sa.ColumnElement[bool], ...]:
        columns, text = self._positions.c, lineage_text(kept.lineage)
        is_it = columns.timeline.is_(None) if text is None else columns.timeline == text
        return *self._at(partition), columns.position == kept.id, is_it

    def bury(
        self, connection: Connection, cluster: UUID, partition: int, letters: Sequence[tuple[int, int]], why: str
    ) -> None:
        """Write dead letters: transactions, by id and kind, that the view will not contain. They replace those which a
        view left that is built anew."""
        assert self._dead is not None
        columns, ids = self._dead.c, [id_ for id_, _ in letters]
        left = columns.view_name == self._view, columns.partition_id == partition, columns.id.between(ids[0], ids[-1])
        connection.execute(sa.delete(self._dead).where(*left))
        whole = {"view_name": self._view, "partition_id": partition, "cluster": str(cluster), "reason": why[:REASON_MAX]}
        now = datetime.now(UTC)
        rows = [{**whole, "id": id_, "kind": kind, "put_aside": now} for id_, kind in letters]
        connection.execute(sa.insert(self._dead), rows)

    def _at(self, partition: int) -> tuple[sa.ColumnElement[bool], sa.ColumnElement[bool]]:
        return self._positions.c.view_name == self._view, self._positions.c.partition_id == partition

    def _insert(self, partition: int) -> sa.Insert:
        return sa.insert(self._positions).values(view_name=self._view, partition_id=partition, position=EMPTY)


def key_columns(name: str) -> tuple[sa.Column[Any], sa.Column[Any]]:
    """Return the first two columns of a primary key: a name and a partition."""
    return (
        sa.Column(name, sa.String(NAME_MAX), primary_key=True),
        sa.Column("partition_id", sa.Integer, primary_key=True, autoincrement=False),
    )


# -- tables ------------------------------------------------------------------------------------------------------------


def prove_transactions(
    engine: Engine, table: sa.Table, insert: sa.Insert, this: tuple[sa.ColumnElement[bool], ...]
) -> None:
    """Raise `BadArgument` if the row `this` exists after its insert was rolled back."""
    with engine.connect() as connection:
        connection.execute(insert)
        connection.rollback()
    with engine.connect() as connection:
        if connection.execute(sa.select(sa.literal(1)).select_from(table).where(*this)).first() is None:
            return
    with engine.begin() as connection:
        connection.execute(sa.delete(table).where(*this))
    raise BadArgument(
        f"a row of {table.name} exists after its insert was rolled back: this {engine.dialect.name} engine "
        "commits every statement, or the storage engine of the table has no transactions",
        next_step="give an engine that does not commit by itself, and tables of a transactional kind",
    )


def claim(engine: Engine, table: sa.Table, row: Mapping[str, str]) -> Mapping[str, str]:
    """Insert a row unless its primary key is taken; return the row that the table holds under this key."""
    here = [column == row[column.name] for column in table.primary_key]

    def read() -> Mapping[str, str] | None:
        with engine.connect() as connection:
            found = connection.execute(sa.select(table).where(*here)).mappings().first()
        return None if found is None else {column.name: found[column] for column in table.columns}

    found = read()
    if found is None:
        try:
            with engine.begin() as connection:
                connection.execute(sa.insert(table).values(row))
            return row
        except IntegrityError:
            found = read()  # another process inserted it first
            if found is None:
                raise
    return found


def limit_waiting(connection: Connection, seconds: int) -> None:
    """Bound how long this transaction waits for locks on PostgreSQL. The other engines have a setting of their own."""
    if connection.engine.dialect.name == "postgresql":
        connection.exec_driver_sql(f"SET LOCAL lock_timeout = '{seconds}s'")


def create(engine: Engine, metadata: sa.MetaData) -> None:
    """Create the missing tables; other processes may do so at the same time."""
    if engine.dialect.name != "sqlite":
        _create_together(engine, metadata.sorted_tables, partial(metadata.create_all, engine))
        return
    # Not `create_all`: it reads before it writes, and SQLite fails if two transactions do that at the same time.
    for table in metadata.sorted_tables:
        if _are_missing(engine, [table]):
            _create_together(engine, [table], partial(table.create, engine, checkfirst=False))


def add_columns(engine: Engine, table: sa.Table) -> None:
    """Add the columns that a table of an earlier version lacks. They are NULL in the rows that are there."""
    known = _columns(engine, table)
    for column in [column for column in table.columns if column.name not in known]:
        name = engine.dialect.identifier_preparer.format_table(table)
        what = sa.schema.CreateColumn(column).compile(dialect=engine.dialect)
        try:
            with engine.begin() as connection:
                connection.exec_driver_sql(f"ALTER TABLE {name} ADD COLUMN {what}")
        except DBAPIError:
            if column.name not in _columns(engine, table):
                raise
            # another process added it at the same time


def _columns(engine: Engine, table: sa.Table) -> set[str]:
    return {column["name"] for column in sa.inspect(engine).get_columns(table.name, schema=table.schema)}


def _create_together(engine: Engine, tables: Sequence[sa.Table], make: Callable[[], None]) -> None:
    try:
        make()
    except DBAPIError:
        if _are_missing(engine, tables):
            raise
        # another process made them at the same time


def _are_missing(engine: Engine, tables: Sequence[sa.Table]) -> bool:
    inspector = sa.inspect(engine)
    return not all(inspector.has_table(table.name, schema=table.schema) for table in tables)

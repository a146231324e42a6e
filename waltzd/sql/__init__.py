"""Views in a SQL database: each transaction of the log is applied exactly once, together with its position.

Needs SQLAlchemy, which the extra `waltzd[sql]` brings, and the driver of the database."""

from __future__ import annotations

try:
    import sqlalchemy as _sqlalchemy  # noqa: F401  # to say what is missing before anything else is read
except ModuleNotFoundError as error:
    if error.name != "sqlalchemy":
        raise
    raise ModuleNotFoundError(
        "waltzd.sql needs SQLAlchemy, which is not installed: pip install 'waltzd[sql]', and the driver of your database",
        name="sqlalchemy",
    ) from None

from waltzd.sql.command import SqlCommand
from waltzd.sql.guard import sqlite
from waltzd.sql.inbox import SqlInbox
from waltzd.sql.view import Poison, SqlView

__all__ = ["Poison", "SqlCommand", "SqlInbox", "SqlView", "sqlite"]

"""What is given to a view as its engine or function and is neither: each has an error of its own, before anything runs."""

from __future__ import annotations

import asyncio
import functools
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

from tests.unit.waltzd.sql.test_view import CLUSTER, Given
from waltzd.client.view import Transaction
from waltzd.errors import ApplyFailed, BadArgument
from waltzd.sql import SqlView, sqlite
from waltzd.sql.guard import name_of

ROOT = Path(__file__).parents[4]


def apply(connection: Connection, given: Transaction[str]) -> None:
    pass


async def apply_later(connection: Connection, given: Transaction[str]) -> None:
    raise AssertionError


async def apply_in_pieces(connection: Connection, given: Transaction[str]) -> AsyncIterator[None]:
    yield


def apply_lazily(connection: Connection, given: Transaction[str]) -> Iterator[None]:
    yield


class Applies:
    def __call__(self, connection: Connection, given: Transaction[str]) -> None:
        pass


class AppliesLater:
    async def __call__(self, connection: Connection, given: Transaction[str]) -> None:
        raise AssertionError


class AsyncEngine:
    """As that of SQLAlchemy, which needs a library more: it has an engine within."""

    def __init__(self, engine: Engine) -> None:
        self.sync_engine = engine


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = sqlite(str(tmp_path / "view.db"))
    yield engine
    engine.dispose()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda engine: str(engine.url), "is a URL, and an engine is needed"),
        (lambda engine: engine.url, "is a URL, and an engine is needed"),
        (AsyncEngine, "is an async engine"),
        (lambda engine: None, "of type NoneType, and an engine"),
        (lambda engine: engine.connect, "of type method, and an engine"),
    ],
    ids=["text", "URL", "async engine", "nothing", "something else"],
)
def test_what_is_no_engine_is_refused_with_the_way_to_one(engine: Engine, given: Any, message: str) -> None:
    with pytest.raises(BadArgument, match=message) as raised:
        SqlView(given(engine), apply)
    assert "create_engine(URL)" in raised.value.detail_next_step


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (apply_later, "not an async one"),
        (AppliesLater(), "not an async one"),
        (functools.partial(apply_later), "not an async one"),
        (apply_in_pieces, "not an async one"),
        (apply_lazily, "contains `yield`"),
        (functools.partial(apply_lazily), "contains `yield`"),
        ("apply", "not callable: str"),
    ],
)
@pytest.mark.parametrize("argument", ["apply", "apply_many"])
def test_a_function_that_would_apply_nothing_is_refused(engine: Engine, argument: str, function: Any, message: str) -> None:
    with pytest.raises(BadArgument, match=message):
        SqlView(engine, **{argument: function})


def test_one_function_is_given(engine: Engine) -> None:
    each: tuple[dict[str, Any], ...] = ({}, {"apply": apply, "apply_many": apply})
    for functions in each:
        with pytest.raises(BadArgument, match="either `apply` or `apply_many`"):
            SqlView(engine, **functions)


@pytest.mark.parametrize(
    "result",
    [
        lambda: apply_later(None, Given(0)),  # type: ignore[arg-type]
        lambda: apply_lazily(None, Given(0)),  # type: ignore[arg-type]
        lambda: apply_in_pieces(None, Given(0)),  # type: ignore[arg-type]
    ],
    ids=["coroutine", "generator", "async generator"],
)
def test_a_function_that_returns_its_work_undone_has_failed(engine: Engine, result: Any) -> None:
    view: SqlView[str] = SqlView(engine, lambda connection, given: result())
    view._prepare(CLUSTER)
    assert view.read_position(0) == -1
    with pytest.raises(ApplyFailed, match="and applied nothing: give a plain function"):
        view.apply_all([Given(0)])
    assert view.read_position(0) == -1
    asyncio.run(view.close())


def test_a_function_is_known_by_its_qualified_name() -> None:
    assert name_of(apply).endswith("test_guard.apply")
    assert name_of(functools.partial(apply)) == name_of(apply)
    assert name_of(Applies()) == name_of(Applies)
    assert name_of(Applies().__call__).endswith("Applies.__call__")


@pytest.mark.slow
@pytest.mark.parametrize("how", [["-m", "shop"], ["shop.py"]], ids=["as a module", "as a file"])
def test_a_program_that_is_started_has_the_name_under_which_it_is_imported(tmp_path: Path, how: list[str]) -> None:
    (tmp_path / "shop.py").write_text(
        "from waltzd.sql.guard import name_of\ndef apply(connection, transaction): ...\n"
        "if __name__ == '__main__':\n    print(name_of(apply))\n"
    )
    done = subprocess.run([sys.executable, *how], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("shop.apply\n", "")


def test_without_sqlalchemy_the_import_says_what_to_install() -> None:
    code = "import sys; sys.modules['sqlalchemy'] = None\nimport waltzd.sql"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1] == (
        "ModuleNotFoundError: waltzd.sql needs SQLAlchemy, which is not installed: pip install 'waltzd[sql]', "
        "and the driver of your database"
    )
    assert "During handling" not in done.stderr


def test_the_engines_that_are_given_stay_as_they_are(engine: Engine) -> None:
    assert SqlView(engine, apply)._engine is engine
    assert SqlView(sa.create_engine("sqlite://"), Applies()).name == "view"

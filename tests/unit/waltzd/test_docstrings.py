"""Everything that an application imports says what it is, where an editor shows it: each name, and what belongs to it."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from types import UnionType
from typing import Any

import pytest

from waltzd import errors
from waltzd.errors.operations import tree

PACKAGES = ("waltzd", "waltzd.sql", "waltzd.testing", "waltzd.serializers")
PUBLIC = [(package, name) for package in PACKAGES for name in importlib.import_module(package).__all__]


def documented(owner: type, name: str, value: Any) -> Iterator[tuple[str, str | None]]:
    """The name in a class that is public, with its docstring; what data is has none of its own."""
    function = value.__func__ if isinstance(value, staticmethod | classmethod) else value
    if isinstance(function, property) or inspect.isfunction(function):
        yield f"{owner.__qualname__}.{name}", function.__doc__


def members(cls: type) -> Iterator[tuple[str, str | None]]:
    for owner in cls.__mro__:
        if owner.__module__.startswith("waltzd"):
            for name, value in vars(owner).items():
                if not name.startswith("_"):
                    yield from documented(owner, name, value)


@pytest.mark.parametrize(("package", "name"), PUBLIC, ids=[f"{package}.{name}" for package, name in PUBLIC])
def test_a_public_name_and_its_members_have_docstrings(package: str, name: str) -> None:
    value = getattr(importlib.import_module(package), name)
    if isinstance(value, UnionType):
        return  # its parts are public names, too
    found = [(name, value.__doc__), *(members(value) if isinstance(value, type) else ())]
    made = f"{name}("  # what a dataclass or a named tuple without a docstring says of itself
    missing = [what for what, text in found if not (text or "").strip() or (text or "").startswith(made)]
    assert missing == []


@pytest.mark.parametrize(("package", "name"), PUBLIC, ids=[f"{package}.{name}" for package, name in PUBLIC])
def test_fields_have_a_text_below_them_or_among_the_attributes(package: str, name: str) -> None:
    value = getattr(importlib.import_module(package), name)
    if not isinstance(value, type):
        return
    body = ast.parse(textwrap.dedent(inspect.getsource(value))).body[0]
    assert isinstance(body, ast.ClassDef)
    missing = []
    for statement, below in zip(body.body, [*body.body[1:], None], strict=True):
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        names = [one.id for one in targets if isinstance(one, ast.Name) and not one.id.startswith("_")]
        text = below.value.value if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) else None
        is_told = isinstance(text, str)
        methods = {
            one for one in names if inspect.isfunction(getattr(value, one, None))
        }  # they have docstrings of their own
        missing += [one for one in names if one not in methods and not is_told and f" {one}: " not in (value.__doc__ or "")]
    assert missing == []


@pytest.mark.parametrize(("package", "name"), PUBLIC, ids=[f"{package}.{name}" for package, name in PUBLIC])
def test_an_error_that_a_public_text_names_is_an_error_of_applications(package: str, name: str) -> None:
    value = getattr(importlib.import_module(package), name)
    texts = [(name, getattr(value, "__doc__", "")), *(members(value) if isinstance(value, type) else ())]
    elsewhere = {cls.__name__ for cls in tree().values() if cls.__name__ not in errors.__all__}
    named = {what: sorted(elsewhere & set(re.findall(r"\w+", text or ""))) for what, text in texts}
    assert {what: found for what, found in named.items() if found} == {}, "move the class to `waltzd.errors`"

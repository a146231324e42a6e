"""What applications read in their editor: every public name is explained, with its arguments."""

from __future__ import annotations

from collections.abc import Iterator
from inspect import signature
from types import FunctionType
from typing import Any

import pytest

import waltzd
from waltzd.sql import SqlView, sqlite
from waltzd.testing import LocalCluster

NAMES = [*[getattr(waltzd, name) for name in waltzd.__all__], SqlView, sqlite, LocalCluster]
EXPLAINED = [one for one in NAMES if isinstance(one, type | FunctionType)]


def functions_of(thing: Any) -> Iterator[FunctionType]:
    """Of a class, the public ones that it declares itself, and an `__init__` that is explained."""
    if isinstance(thing, FunctionType):
        yield thing
        return
    for name, member in vars(thing).items():
        function = member.fget if isinstance(member, property) else member
        is_public = not name.startswith("_") or (name == "__init__" and function.__doc__)
        if isinstance(function, FunctionType) and is_public:
            yield function


@pytest.mark.parametrize(
    "thing", [one for one in NAMES if isinstance(one, type | FunctionType)], ids=lambda one: one.__name__
)
def test_every_public_name_is_explained_with_its_arguments(thing: Any) -> None:
    assert vars(thing).get("__doc__") or isinstance(thing, FunctionType)
    for function in functions_of(thing):
        said = function.__doc__ or ""
        assert said, function.__qualname__
        if "Args:" in said and "those of `Client`" not in said:
            missing = [name for name in signature(function).parameters if name != "self" and f"{name}:" not in said]
            assert missing == [], function.__qualname__

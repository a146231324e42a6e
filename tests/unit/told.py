"""Tests that are coroutines: what runs them makes what they are given, and looks at what they leave behind."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeAlias

Test: TypeAlias = Callable[..., Coroutine[Any, Any, None]]


def told(run: Callable[..., object], *, given: int = 1, **options: Any) -> Callable[[Test], Callable[..., None]]:
    """Run the test with `run(test, **options)`, which gives it its first `given` arguments; pytest gives the others."""

    def decorate(test: Test) -> Callable[..., None]:
        def whole(**fixtures: Any) -> None:
            run(partial(test, **fixtures), **options)

        whole.__name__, whole.__doc__ = test.__name__, test.__doc__
        signature = inspect.signature(test)
        others = list(signature.parameters.values())[given:]
        whole.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
        return whole

    return decorate

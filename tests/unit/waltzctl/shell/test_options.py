"""How a typed function becomes a command."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal
from uuid import UUID

import pytest
import typer
from typer import Argument, Option

from waltzctl.shell.options import Bare, From, Misused, Negative, command_of, positive


@dataclass(frozen=True, kw_only=True)
class Place:
    host: Annotated[str | None, Option("--host")] = None
    ports: Annotated[tuple[int, ...], Option("--port")] = ()


def _url(place: Annotated[Place, From(Place)]) -> str:
    return f"{place.host}:{','.join(map(str, place.ports))}"


def called(*words: str) -> dict[str, Any]:
    got: dict[str, Any] = {}

    def look(
        *,
        names: Annotated[tuple[str, ...], Argument()] = (),
        place: Annotated[Place, From(Place)],
        url: Annotated[str, From(_url)],
        every: Annotated[float | None, Option("--every", parser=positive), Bare("2")] = None,
    ) -> int:
        """Look."""
        got.update(names=names, place=place, url=url, every=every)
        return 7

    command = command_of("look", look)
    assert [option for param in command.params for option in param.opts].count("--host") == 1, "declared once"
    assert command.main(list(words), prog_name="look", standalone_mode=False) == 7
    return got


def test_what_is_made_of_options() -> None:
    assert called() == {"names": (), "place": Place(), "url": "None:", "every": None}
    got = called("a", "b", "--host", "x", "--port", "1", "--port", "2")
    assert got == {"names": ("a", "b"), "place": Place(host="x", ports=(1, 2)), "url": "x:1,2", "every": None}


def test_an_option_may_stand_without_its_value() -> None:
    assert called("--every")["every"] == called("--every", "--host", "x")["every"] == 2.0
    assert called("--every", "0.5")["every"] == 0.5
    for wrong in ("0", "-1", "nan", "often"):
        with pytest.raises(typer.BadParameter):
            called("--every=" + wrong)


def test_what_is_no_number_passes_no_bound() -> None:
    def wait(*, every: Annotated[float, Option(min=0.5, max=60)] = 1.0, rate: Annotated[float, Option()] = 1.0) -> int:
        return 3

    command = command_of("wait", wait)
    assert command.main(["--every", "2", "--rate", "inf"], standalone_mode=False) == 3
    for words, message in (
        (["--every", "nan"], "'nan' is not a number from 0.5 to 60."),
        (["--rate", "nan"], "'nan' is not a number."),
    ):
        with pytest.raises(typer.BadParameter) as refused:
            command.main(words, standalone_mode=False)
        assert refused.value.message == message
    for text in ("nan", "inf", "-1", "0", "x"):
        with pytest.raises(typer.BadParameter):
            positive(text)
    assert positive("0.5") == 0.5


def test_a_number_may_be_negative_where_that_is_said() -> None:
    def mark(*, number: Annotated[int, Argument(), Negative()]) -> int:
        return number

    def plain(*, number: Annotated[int, Argument()]) -> int:
        return number

    assert command_of("mark", mark).main(["-1"], standalone_mode=False) == -1
    with pytest.raises(typer.TyperException):
        command_of("plain", plain).main(["-1"], standalone_mode=False)


def test_what_was_mistyped_is_said_in_the_words_of_who_typed_it() -> None:
    def count(
        *,
        number: Annotated[int, Argument(min=0)] = 0,
        few: Annotated[int, Option("--few", min=1, max=1000)] = 1,
        any_: Annotated[int, Option("--any")] = 1,
        seconds: Annotated[float, Option("--seconds", min=0.1, max=60)] = 1,
        key: Annotated[UUID | None, Option("--key")] = None,
        form: Annotated[Literal["table", "json"], Option("--form")] = "table",
    ) -> int:
        return 0

    for words, said in (
        (["x"], "'x' is not a whole number from 0 on."),
        (["--few", "1001"], "1001 is not a whole number from 1 to 1000."),
        (["--few", "1.5"], "'1.5' is not a whole number from 1 to 1000."),
        (["--any", "many"], "'many' is not a whole number."),
        (["--seconds", "0"], "0.0 is not a number from 0.1 to 60."),
        (["--key", "5"], "'5' is not a UUID, like 5e0f0c8e-0d2f-4d0e-9a53-0a6f2f3c7b11."),
        (["--form", "xml"], "'xml' is not one of 'table', 'json'."),
    ):
        with pytest.raises(typer.BadParameter) as mistake:
            command_of("count", count).main(words, standalone_mode=False)
        assert mistake.value.message == said


def test_what_does_not_go_together_is_said_as_it_is() -> None:
    assert Misused("Say one of them.").format_message() == "Say one of them."

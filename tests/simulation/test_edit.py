"""How the place of an edit is found, and what is put there."""

from __future__ import annotations

import pytest

from tests.simulation.edit import places_of, put, span_of

MODULE = '''
class Shelf:
    """A shelf: `if count > 3`."""

    def take(self, count):
        if count > 3:  # there are never more
            raise ValueError(f"only three of {count} things are there")
        return self.things[
            :count,
        ]


def give(count):
    if count > 3:
        return None
'''


def change(scope: str, old: str, new: str) -> str:
    start, end = span_of(MODULE, scope)
    ((first, last),) = places_of(old, MODULE[start:end])
    return put(MODULE, start + first, start + last, old, new)


@pytest.mark.parametrize(
    "old",
    [
        "        if count > 3:\n",
        "        if count > 3:  # another reason\n",
        "    if count>3 :\n",
    ],
)
def test_comments_spaces_and_margins_do_not_matter(old: str) -> None:
    changed = change("Shelf.take", old, old.replace(">", ">="))
    assert "        if count >= 3:" in changed or "        if count>=3 :" in changed
    assert "`if count > 3`" in changed
    assert "def give(count):\n    if count > 3:\n" in changed


def test_words_of_a_message_do_not_matter() -> None:
    assert "            pass\n" in change(
        "Shelf.take", '            raise ValueError("too many things")\n', "            pass\n"
    )


def test_line_breaks_and_last_commas_do_not_matter() -> None:
    changed = change("Shelf.take", "        return self.things[:count]\n", "        return self.things\n")
    assert changed.count("return self.things\n") == 1


def test_a_place_that_stands_twice_is_told_by_its_scope() -> None:
    assert len(places_of("if count > 3:", MODULE)) == 2
    assert change("give", "    if count > 3:\n", "    if count > 4:\n").endswith("    if count > 4:\n        return None\n")


def test_the_same_words_decide_between_places_of_one_form() -> None:
    source = 'return "one thing"\nreturn "another thing"\n'
    assert places_of('return "another thing"', source) == [(19, len(source) - 1)]
    assert len(places_of('return "a third thing"', source)) == 2


def test_a_scope_that_is_not_there_is_an_error() -> None:
    with pytest.raises(LookupError, match=r"Shelf\.put"):
        span_of(MODULE, "Shelf.put")

"""One object of a JSON document while it is read: every field is asked for by name and type. Pure.

What is missing, ill-typed, out of its bounds or left over is `BadMetadata` with the path and the field.
"""

from __future__ import annotations

import json
import re
from uuid import UUID

from waltzd.cluster.meta import Role
from waltzd.errors import BadMetadata
from waltzd.format.layout import ID_MAX
from waltzd.protocol.address import is_name

_NUMBER = re.compile(r"0|[1-9][0-9]{0,18}")
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


class Fields:
    """One JSON object while it is read: every field is asked for by name and type, and none may be left over."""

    def __init__(self, value: object, path: str, place: str = "") -> None:
        self._path, self._place, self._asked = path, place, set[str]()
        if not isinstance(value, dict):
            raise self.wrong("", f"must be an object, not {_shown(value)}")
        self._fields: dict[str, object] = value

    def wrong(self, name: str, what: str) -> BadMetadata:
        place = f"{self._place}.{name}" if self._place and name else self._place or name or "the document"
        return BadMetadata(f"{self._path}: {place} {what}", path=self._path, field=place)

    def take(self, name: str) -> object:
        self._asked.add(name)
        if name not in self._fields:
            raise self.wrong(name, "is missing")
        return self._fields[name]

    def end(self) -> None:
        for name in self._fields:
            if name not in self._asked:
                raise self.wrong(name, "is not known to this version of Waltz")

    def integer(self, name: str, *, least: int = 0, most: int = ID_MAX) -> int:
        value = self.take(name)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self.wrong(name, f"must be a whole number from {least} to {most}, not {_shown(value)}")
        return value

    def integer_or_none(self, name: str, *, least: int) -> int | None:
        return None if self.take(name) is None else self.integer(name, least=least)

    def text(self, name: str) -> str:
        value = self.take(name)
        if not isinstance(value, str) or not value:
            raise self.wrong(name, f"must be a text, not {_shown(value)}")
        return value

    def name(self, name: str) -> str:
        return self._named(name, self.text(name))

    def name_or_none(self, name: str) -> str | None:
        return None if self.take(name) is None else self.name(name)

    def text_or_none(self, name: str) -> str | None:
        return None if self.take(name) is None else self.text(name)

    def texts(self, name: str) -> tuple[str, ...]:
        found = []
        for value in self._list(name):
            if not isinstance(value, str):
                raise self.wrong(name, f"must be texts, not {_shown(value)}")
            found.append(value)
        return tuple(found)

    def names(self, name: str) -> tuple[str, ...]:
        names = [self._named(name, value) for value in self._list(name)]
        if len(set(names)) != len(names):
            raise self.wrong(name, "has a name twice")
        return tuple(names)

    def _named(self, name: str, value: object) -> str:
        if not isinstance(value, str) or not is_name(value):
            raise self.wrong(name, f"must be a name of letters, digits, dots, dashes and underscores, not {_shown(value)}")
        return value

    def integers(self, name: str) -> tuple[int, ...]:
        found = []
        for value in self._list(name):
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= ID_MAX:
                raise self.wrong(name, f"must be whole numbers of 0 or above, not {_shown(value)}")
            found.append(value)
        return tuple(found)

    def _list(self, name: str) -> list[object]:
        value = self.take(name)
        if not isinstance(value, list):
            raise self.wrong(name, f"must be a list, not {_shown(value)}")
        return value

    def flag(self, name: str) -> bool:
        value = self.take(name)
        if not isinstance(value, bool):
            raise self.wrong(name, f"must be true or false, not {_shown(value)}")
        return value

    def uuid(self, name: str) -> UUID:
        value = self.take(name)
        if not isinstance(value, str) or not _UUID.fullmatch(value):
            raise self.wrong(name, f"must be a UUID, not {_shown(value)}")
        return UUID(value)

    def role(self, name: str) -> Role:
        value = self.take(name)
        if value not in [role.value for role in Role]:
            raise self.wrong(name, f"must be {' or '.join(Role)}, not {_shown(value)}")
        return Role(str(value))

    def object(self, name: str) -> Fields:
        return Fields(self.take(name), self._path, f"{self._place}.{name}" if self._place else name)

    def object_or_none(self, name: str) -> Fields | None:
        return None if self.take(name) is None else self.object(name)

    def keys_of_names(self) -> list[str]:
        return [self._named(key, key) for key in self._fields]

    def keys_of_partitions(self) -> list[int]:
        for key in self._fields:
            if not _NUMBER.fullmatch(key) or int(key) > ID_MAX:
                raise self.wrong(key, "is not the number of a partition")
        return sorted(map(int, self._fields))


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:60] + "…"

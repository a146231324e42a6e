"""A settings file: YAML that is checked against a declaration, and the effective values as such a file.

A declaration is a frozen dataclass whose fields are `waltzd.daemon.settings.setting`, with a method `conflicts`;
`waltzd.daemon.config` has those of the daemons. All errors of a file are reported at once.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import yaml

from waltzd.daemon.settings import Setting, declared, format_size, format_value, is_optional, read_value
from waltzd.errors.operations import BadConfig

TEXT_BYTES_MAX = 64 << 10
NESTING_MAX = 8
"""Limit of the nesting of values. Settings have no structure; a nested value is only read to report it."""

T = TypeVar("T")


# -- reading -----------------------------------------------------------------------------------------------------------


class Problem(NamedTuple):
    line: int | None
    text: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.text}" if self.line is not None else self.text


def load(path: str, kind: type[T]) -> T:
    """Return the settings in a file; raise one `BadConfig` with all its errors."""
    return parse(text_of(path), kind, source=path)


def parse(text: str, kind: type[T], *, source: str = "configuration") -> T:
    """Return the settings in a YAML text; raise one `BadConfig` with all its errors."""
    return sound(source, *read(text, kind))


def text_of(path: str) -> str:
    try:
        with open(path, "rb") as file:
            raw = file.read(TEXT_BYTES_MAX + 1)
    except OSError as error:
        raise BadConfig(f"cannot read the configuration file {path}: {error.strerror}") from error
    if len(raw) > TEXT_BYTES_MAX:
        raise BadConfig(f"{path} is larger than {format_size(TEXT_BYTES_MAX)}: this is not a configuration file")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise BadConfig(f"{path}, line {line}: the file is not UTF-8 text") from error


def sound(source: str, config: T | None, problems: Sequence[Problem]) -> T:
    """Return the settings, or raise one `BadConfig` with all problems."""
    if config is not None:
        return config
    if len(problems) == 1:
        raise BadConfig(f"{source}: {problems[0]}")
    raise BadConfig("\n  ".join([f"{source} has {len(problems)} problems:", *map(str, problems)]))


def lines(text: str) -> tuple[dict[str, int], list[Problem]]:
    """Return the keys of a text with their lines, or the problem if it is not lines of `key: value`."""
    found: dict[str, int] = {}
    try:
        for key, _ in _entries(text):
            found.setdefault(key.value, _line(key))
    except _Unfit as unfit:
        return {}, [unfit.problem]
    return found, []


def read(text: str, kind: type[T]) -> tuple[T | None, list[Problem]]:
    """Return the settings in a YAML text, or all problems in the order of the lines."""
    known = declared(kind)
    try:
        entries = _entries(text)
    except _Unfit as unfit:
        return None, [unfit.problem]
    problems: list[Problem] = []
    given: dict[str, int] = {}
    values: dict[str, Any] = {}
    for key, node in entries:
        name, line = key.value, _line(key)
        if name not in known:
            problems.append(Problem(line, f"{name} is not a setting{_nearest(name, known)}"))
        elif name in given:
            problems.append(Problem(line, f"{name} is given twice; the first time in line {given[name]}"))
        else:
            given[name] = line
            try:
                values[name] = _value(name, node, *known[name])
            except ValueError as error:
                problems.append(Problem(line, str(error)))
    for name, (_, about) in known.items():
        if about.required and name not in given:
            problems.append(Problem(None, f"{name} is missing. {about.doc}"))
    if not problems:
        config: Any = kind(**values)
        problems = [Problem(given.get(name), f"{name}: {what}") for name, what in config.conflicts()]
        if not problems:
            return config, []
    return None, sorted(problems, key=lambda problem: problem.line or 0)


_PLAIN = "tag:yaml.org,2002:str"
_ALIAS = "alias"


class _Unfit(Exception):
    """The text is not lines of `key: value`."""

    def __init__(self, line: int | None, text: str) -> None:
        super().__init__(text)
        self.problem = Problem(line, text)


class _Loader(yaml.BaseLoader):
    """A loader that keeps the text of nodes, follows no alias, ignores tags, and limits the nesting."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            alias = self.get_event()  # type: ignore[no-untyped-call]
            return yaml.ScalarNode(_ALIAS, alias.anchor, alias.start_mark, alias.end_mark)
        if self.depth > NESTING_MAX:
            raise _Unfit(_line(self.peek_event()), "values are nested too deeply here")  # type: ignore[no-untyped-call]
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def _entries(text: str) -> list[tuple[yaml.ScalarNode, yaml.Node]]:
    try:
        loader = _Loader(text)
        if not loader.check_node():
            return []
        root = loader.get_node()
        if loader.check_node():
            second = loader.peek_event()  # type: ignore[no-untyped-call]
            raise _Unfit(_line(second), "a second document starts here; there must be one")
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else None
        raise _Unfit(line, f"this is not YAML: {error.problem or error.context}") from error
    except yaml.reader.ReaderError as error:
        raise _Unfit(text.count("\n", 0, error.position) + 1, "there is a character that YAML does not allow") from error
    except (ValueError, OverflowError) as error:  # the parser hands them to Python as they are
        what = "this is not YAML: an escape that means no character, or a number of far too many digits"
        raise _Unfit(None, what) from error
    if isinstance(root, yaml.ScalarNode) and not root.value:
        return []
    if not isinstance(root, yaml.MappingNode):
        raise _Unfit(_line(root), "the file must be lines of `key: value`")
    for key, _ in root.value:
        if not isinstance(key, yaml.ScalarNode):
            raise _Unfit(_line(key), "a key must be a plain word")
    return list(root.value)


def _line(place: Any) -> int:
    """Return the line of a node or an event."""
    line: int = place.start_mark.line
    return line + 1


def _value(name: str, node: yaml.Node, type_: Any, about: Setting) -> Any:
    """Return the value of a node; raise ValueError with a sentence for the user."""
    if not isinstance(node, yaml.ScalarNode):
        raise ValueError(f"{name} must be one value, not a list or a mapping")
    if node.tag == _ALIAS:
        raise ValueError(f"{name}: aliases (*{node.value}) are not followed; write the value")
    if node.tag != _PLAIN:
        raise ValueError(f"{name}: tags ({node.tag}) are not used; write the plain value")
    if not node.style and node.value in ("", "~", "null", "Null", "NULL"):
        if is_optional(type_):
            return about.default
        advice = "give it one" if about.required else "give it one, or leave the line out for the default"
        raise ValueError(f"{name} has no value; {advice}")
    try:
        return read_value(node.value, type_, about)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _nearest(name: str, known: Mapping[str, object]) -> str:
    plain = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).replace("-", "_").lower()
    close = difflib.get_close_matches(plain, known, n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


# -- showing -----------------------------------------------------------------------------------------------------------


def resolved(config: Any) -> dict[str, str]:
    """Return the effective value of every setting, formatted as in the file."""
    return {name: format_value(getattr(config, name), about) for name, (_, about) in declared(type(config)).items()}


def show(config: Any) -> str:
    """Return the effective values as YAML that can be loaded again, with a mark at defaults."""
    lines = []
    for name, (_, about) in declared(type(config)).items():
        value = getattr(config, name)
        is_default = not about.required and value == about.default
        text = format_value(value, about) if value is None else _quoted(format_value(value, about))
        lines.append(f"{name}: {text}{'  # default' if is_default else ''}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    is_plain = re.fullmatch(r"[A-Za-z0-9/]([A-Za-z0-9_./:-]*[A-Za-z0-9/])?", text) and text.lower() != "null"
    return text if is_plain else "'" + text.replace("'", "''") + "'"

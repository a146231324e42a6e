"""A file of settings: YAML read against a declaration, and the texts that are made from the same declaration.

A declaration is a frozen dataclass whose fields are `waltzd.daemon.settings.setting`, with a method `conflicts`;
`waltzd.daemon.config` has those of the daemons. All that is wrong with a file is reported at once. Everything here takes
text and returns values, apart from `load`, which reads the file.
"""

from __future__ import annotations

import difflib
import re
import textwrap
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import yaml

from waltzd.daemon.settings import Setting, declared, is_optional, read_value, spell, spell_size
from waltzd.errors import BadConfig

TEXT_BYTES_MAX = 64 << 10
NESTING_MAX = 8
"""No setting has a structure; what is skipped over to report it is bounded all the same."""

T = TypeVar("T")


# -- reading -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    line: int | None
    text: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.text}" if self.line is not None else self.text


@dataclass(frozen=True)
class _Given:
    """A key that is in the file. `text` is None when it has no value; `is_refused`, when that was reported already."""

    line: int | None
    text: str | None
    is_refused: bool = False


def load(path: str, kind: type[T]) -> T:
    """The settings in a file. Every way in which that can fail is a `BadConfig`."""
    try:
        with open(path, "rb") as file:
            raw = file.read(TEXT_BYTES_MAX + 1)
    except OSError as error:
        raise BadConfig(f"cannot read the configuration file {path}: {error.strerror}") from error
    if len(raw) > TEXT_BYTES_MAX:
        raise BadConfig(f"{path} is larger than {spell_size(TEXT_BYTES_MAX)}: this is not a configuration file")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise BadConfig(f"{path}, line {line}: the file is not UTF-8 text") from error
    return parse(text, kind, source=path)


def parse(text: str, kind: type[T], *, source: str = "configuration") -> T:
    """The settings in a YAML text. All problems are found before the one error is raised."""
    problems: list[Problem] = []
    given: dict[str, _Given] = {}
    is_whole = _read(text, declared(kind), given, problems)
    values: dict[str, Any] = {}
    for name, (type_, about) in declared(kind).items():
        found = given.get(name)
        if found is not None and (found.is_refused or (found.text is None and is_optional(type_))):
            continue
        if found is None:
            if about.required and is_whole:
                problems.append(Problem(None, f"{name} is missing. {about.doc}"))
            continue
        if found.text is None:
            advice = "give it one" if about.required else "give it one, or leave the line out for the default"
            problems.append(Problem(found.line, f"{name} has no value; {advice}"))
            continue
        try:
            values[name] = read_value(found.text, type_, about)
        except ValueError as error:
            problems.append(Problem(found.line, f"{name}: {error}"))
    if problems:
        raise _bad(source, problems)
    config: Any = kind(**values)
    for name, what in config.conflicts():
        problems.append(Problem(given[name].line if name in given else None, f"{name}: {what}"))
    if problems:
        raise _bad(source, problems)
    return typing.cast(T, config)


def _bad(source: str, problems: list[Problem]) -> BadConfig:
    problems.sort(key=lambda problem: problem.line or 0)
    if len(problems) == 1:
        return BadConfig(f"{source}: {problems[0]}")
    return BadConfig("\n  ".join([f"{source} has {len(problems)} problems:", *map(str, problems)]))


def _read(text: str, known: Mapping[str, object], given: dict[str, _Given], problems: list[Problem]) -> bool:
    """The keys and plain values of the one mapping that the text is; whether it could be followed to its end.

    Works on parser events: no aliases are followed, no tags are obeyed, nothing recurses."""
    try:
        events = _events(text)
        next(events)  # start of the stream
        if isinstance(next(events), yaml.StreamEndEvent):
            return True
        first = next(events)
        if isinstance(first, yaml.ScalarEvent) and not first.value:
            return True
        if not isinstance(first, yaml.MappingStartEvent):
            raise _Stop(first, "the file must be lines of `key: value`")
        while not isinstance(key := next(events), yaml.MappingEndEvent):
            if not isinstance(key, yaml.ScalarEvent):
                raise _Stop(key, "a key must be a plain word")
            _take(key, next(events), events, known, given, problems)
        next(events)  # end of the document
        behind = next(events)
        if not isinstance(behind, yaml.StreamEndEvent):
            raise _Stop(behind, "a second document starts here; there must be one")
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else None
        problems.append(Problem(line, f"this is not YAML: {error.problem or error.context}"))
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        problems.append(Problem(line, "there is a character that YAML does not allow"))
    except _Stop as stop:
        problems.append(Problem(stop.line, stop.text))
    else:
        return True
    return False


def _events(text: str) -> Iterator[yaml.Event]:
    try:
        yield from yaml.parse(text, Loader=yaml.SafeLoader)
    except (ValueError, OverflowError) as error:  # the parser hands them to Python as they are
        what = "an escape that means no character, or a number of far too many digits"
        raise yaml.MarkedYAMLError(problem=what) from error


class _Stop(Exception):
    """The text cannot be followed any further."""

    def __init__(self, event: yaml.Event, text: str) -> None:
        super().__init__(text)
        self.line = _line(event)
        self.text = text


def _take(
    key: yaml.ScalarEvent,
    value: yaml.Event,
    events: Iterator[yaml.Event],
    known: Mapping[str, object],
    given: dict[str, _Given],
    problems: list[Problem],
) -> None:
    name, line = str(key.value), _line(key)
    was_known = name in known
    if not was_known:
        problems.append(Problem(line, f"{name} is not a setting{_nearest(name, known)}"))
    elif name in given:
        problems.append(Problem(line, f"{name} is given twice; the first time in line {given[name].line}"))
    text, is_refused = None, True
    if isinstance(value, yaml.AliasEvent):
        problems.append(Problem(_line(value), f"{name}: aliases (*{value.anchor}) are not followed; write the value"))
    elif not isinstance(value, yaml.ScalarEvent):
        if was_known:
            problems.append(Problem(_line(value), f"{name} must be one value, not a list or a mapping"))
        _skip(value, events)
    elif value.tag is not None:
        problems.append(Problem(_line(value), f"{name}: tags ({value.tag}) are not used; write the plain value"))
    else:
        is_refused = False
        is_null = not value.style and value.value in ("", "~", "null", "Null", "NULL")
        text = None if is_null else str(value.value)
    if was_known and name not in given:
        given[name] = _Given(line, text, is_refused)


def _line(event: yaml.Event) -> int | None:
    return event.start_mark.line + 1 if event.start_mark is not None else None


def _skip(start: yaml.Event, events: Iterator[yaml.Event]) -> None:
    depth = 1
    while depth:
        event = next(events)
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > NESTING_MAX:
                raise _Stop(start, "values are nested too deeply here")
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


def _nearest(name: str, known: Mapping[str, object]) -> str:
    plain = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).replace("-", "_").lower()
    close = difflib.get_close_matches(plain, known, n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


# -- showing -----------------------------------------------------------------------------------------------------------


def resolved(config: Any) -> dict[str, str]:
    """Every setting with the value in force, spelled as in the file."""
    return {name: spell(getattr(config, name), about) for name, (_, about) in declared(type(config)).items()}


def show(config: Any) -> str:
    """The values in force as YAML that can be loaded again, defaults marked."""
    lines = []
    for name, (_, about) in declared(type(config)).items():
        value = getattr(config, name)
        is_default = not about.required and value == about.default
        text = spell(value, about) if value is None else _quoted(spell(value, about))
        lines.append(f"{name}: {text}{'  # default' if is_default else ''}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    is_plain = re.fullmatch(r"[A-Za-z0-9/]([A-Za-z0-9_./:-]*[A-Za-z0-9/])?", text) and text.lower() != "null"
    return text if is_plain else "'" + text.replace("'", "''") + "'"


# -- generated files ---------------------------------------------------------------------------------------------------


def sample(kind: type[Any], title: str) -> str:
    """A commented file with every setting: the required ones set to their example, the others at their default."""
    out = [f"# {title}", "# A line that is commented out shows the default, or an example where there is none.", ""]
    for name, (type_, about) in declared(kind).items():
        out += [f"# {line}" for line in textwrap.wrap(f"{about.doc} {_bounds(type_, about)}".strip(), 100)]
        value = about.example or spell(about.default, about)
        out += [f"{'' if about.required else '# '}{name}: {value}", ""]
    return "\n".join(out).rstrip() + "\n"


def document(kind: type[Any], title: str) -> str:
    """The reference page of all settings."""
    out = [f"## {title}", "", "| setting | default | meaning |", "|---|---|---|"]
    for name, (type_, about) in declared(kind).items():
        default = "must be given" if about.required else f"`{spell(about.default, about)}`"
        meaning = f"{about.doc} {_bounds(type_, about)}".strip().replace("|", "\\|")
        out.append(f"| `{name}` | {default} | {meaning} |")
    return "\n".join(out) + "\n"


def _bounds(type_: Any, about: Setting) -> str:
    if about.choices:
        return f"One of {', '.join(about.choices)}."
    if about.minimum is None or about.maximum is None:
        return ""
    low, high = spell(about.minimum, about), spell(about.maximum, about)
    unit = f" {about.unit}" if about.unit not in ("", "bytes") else ""
    return f"From {low} to {high}{unit}."

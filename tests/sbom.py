"""What a deployment consists of, from the lock: `./dev sbom` writes a bill of materials and the requirements of a machine.

`build/release/waltzd.cdx.json` is a CycloneDX document: Waltz, and what it stands on, each with its version, its licence
where the package says it, and the hashes of all files that the lock allows. `build/release/requirements.txt` has the same
packages for `pip install --require-hashes`, with those of the extras that are asked for: no tool of developers is among
them. Both say the same every time, for the same lock. What depends on what is read from the packages that are installed
here; the lock says which of them there are, also for other machines.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, metadata, requires
from pathlib import Path
from typing import Any
from uuid import NAMESPACE_URL, uuid5

ROOT = Path(__file__).parents[1]
RELEASE = ROOT / "build" / "release"
_ENTRY = re.compile(r"([\w.-]+)==([^\s;\\]+)\s*(?:;\s*([^\\]+?))?\s*\\?$")
_REQUIREMENT = re.compile(r"([\w.-]+)\s*(?:\[([^\]]*)\])?[^;]*(?:;(.*))?")
_EXTRA = re.compile(r"""extra\s*==\s*['"]([^'"]+)['"]""")


@dataclass(frozen=True)
class Locked:
    name: str
    version: str
    marker: str
    """On which machines; empty: on all."""
    hashes: tuple[str, ...]

    @property
    def reference(self) -> str:
        return f"pkg:pypi/{self.name}@{self.version}"

    @property
    def requirement(self) -> str:
        marker = f" ; {self.marker}" if self.marker else ""
        return " \\\n".join([f"{self.name}=={self.version}{marker}", *(f"    --hash=sha256:{one}" for one in self.hashes)])


def plain(name: str) -> str:
    """As indexes compare names."""
    return re.sub(r"[-_.]+", "-", name).lower()


Lock = Mapping[str, tuple[Locked, ...]]
"""By name; a package may have one version for some machines, and another one for others."""


def locked(text: str) -> Lock:
    found: dict[str, tuple[Locked, ...]] = {}
    for entry in re.split(r"\n(?=\S)", text.strip()):
        head, *rest = entry.splitlines()
        match = _ENTRY.fullmatch(head)
        assert match is not None, f"requirements.lock: {head}"
        hashes = tuple(line.strip().removeprefix("--hash=sha256:").removesuffix(" \\") for line in rest)
        one = Locked(plain(match[1]), match[2], match[3] or "", hashes)
        found[one.name] = (*found.get(one.name, ()), one)
    return found


def wanted_by(texts: Iterable[str], extras: Iterable[str]) -> list[tuple[str, tuple[str, ...]]]:
    """The packages that requirements name, with their extras, on any machine: (name, extras)."""
    found, asked = [], set(extras)
    for text in texts:
        match = _REQUIREMENT.match(text.strip())
        assert match is not None, text
        of = _EXTRA.search(match[3] or "")
        if of is None or of[1] in asked:
            found.append((plain(match[1]), tuple(one.strip() for one in (match[2] or "").split(",") if one.strip())))
    return found


def named_by(project: Mapping[str, Any], extras: Iterable[str]) -> list[tuple[str, tuple[str, ...]]]:
    """What the project names itself, with these extras, and those that they name in turn."""
    found, waiting, seen = wanted_by(project["dependencies"], ()), list(extras), set()
    while waiting:
        extra = waiting.pop()
        if extra not in seen:
            seen.add(extra)
            for name, more in wanted_by(project["optional-dependencies"][extra], ()):
                if name == project["name"]:
                    waiting += more
                else:
                    found.append((name, more))
    return found


def needed(roots: Iterable[tuple[str, tuple[str, ...]]], lock: Lock) -> dict[str, list[str]]:
    """What these stand on, all of it: name → what it depends on itself. What the lock does not have is for nobody."""
    found: dict[str, list[str]] = {}
    extras: dict[str, set[str]] = {}
    waiting = list(roots)
    while waiting:
        name, more = waiting.pop()
        if name not in lock or (name in found and set(more) <= extras[name]):
            continue
        extras[name] = extras.get(name, set()) | set(more)
        try:
            below = wanted_by(requires(name) or (), extras[name])
        except PackageNotFoundError:  # it is for other machines
            below = []
        found[name] = sorted({one for one, _ in below if one in lock})
        waiting += below
    return dict(sorted(found.items()))


def bill(project: Mapping[str, Any], lock: Lock) -> dict[str, Any]:
    """The CycloneDX document. What only an extra brings is optional."""
    usual = named_by(project, ())
    always = needed(usual, lock)
    everything = needed(named_by(project, project["optional-dependencies"]), lock)
    us = f"pkg:pypi/{project['name']}@{project['version']}"
    content = {
        "metadata": {
            "component": {
                "type": "application",
                "bom-ref": us,
                "name": project["name"],
                "version": project["version"],
                "purl": us,
                "licenses": [{"expression": project["license"]}],
            }
        },
        "components": [_component(one, is_optional=name not in always) for name in everything for one in lock[name]],
        "dependencies": [
            {"ref": us, "dependsOn": _references(sorted({name for name, _ in usual}), lock)},
            *(
                {"ref": one.reference, "dependsOn": _references(below, lock)}
                for name, below in everything.items()
                for one in lock[name]
            ),
        ],
    }
    number = uuid5(NAMESPACE_URL, json.dumps(content, sort_keys=True))
    return {"bomFormat": "CycloneDX", "specVersion": "1.6", "serialNumber": f"urn:uuid:{number}", "version": 1, **content}


def _references(names: Iterable[str], lock: Lock) -> list[str]:
    return [one.reference for name in names for one in lock.get(name, ())]


def _component(found: Locked, *, is_optional: bool) -> dict[str, Any]:
    component: dict[str, Any] = {
        "type": "library",
        "bom-ref": found.reference,
        "name": found.name,
        "version": found.version,
        "scope": "optional" if is_optional else "required",
        "purl": found.reference,
        # Each file of the package that may be installed; which one it is depends on the machine.
        "externalReferences": [
            {"type": "distribution", "url": found.reference, "hashes": [{"alg": "SHA-256", "content": one}]}
            for one in found.hashes
        ],
    }
    try:
        said = metadata(found.name)
    except PackageNotFoundError:  # it is for other machines
        return component
    if "License-Expression" in said:
        component["licenses"] = [{"expression": said["License-Expression"]}]
    return component


def requirements(project: Mapping[str, Any], lock: Lock, extras: Iterable[str]) -> str:
    return "".join(one.requirement + "\n" for name in needed(named_by(project, extras), lock) for one in lock[name])


def main(arguments: list[str]) -> int:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    parser = argparse.ArgumentParser(prog="./dev sbom", description="A bill of materials, and requirements with hashes.")
    parser.add_argument(
        "extras", nargs="*", metavar="EXTRA", help=f"of the requirements: {', '.join(project['optional-dependencies'])}"
    )
    extras = parser.parse_args(arguments).extras
    if strange := set(extras) - project["optional-dependencies"].keys():
        parser.error(f"there is no extra {min(strange)}")
    lock = locked((ROOT / "requirements.lock").read_text(encoding="utf-8"))
    RELEASE.mkdir(parents=True, exist_ok=True)
    document = json.dumps(bill(project, lock), indent=2)
    for name, content in (("waltzd.cdx.json", document + "\n"), ("requirements.txt", requirements(project, lock, extras))):
        (RELEASE / name).write_text(content, encoding="utf-8")
        print(f"wrote {(RELEASE / name).relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""`./dev release`: everything that is published of a commit, in `build/release`, and what is left for a person.

What is built is the commit that is checked out, without what was changed since; a commit gives the same bytes each time.
The only exception is the first layer of the image, which has the packages that Debian offers that day."""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
import tempfile
import tomllib
from pathlib import Path

from tests.release.debian import build_debian_package
from tests.release.image import build_image, fetch_base
from tests.release.packages import (
    build_sdist,
    build_site,
    build_wheel_of_sdist,
    check_out,
    commit_seconds,
    git,
    packed_folder,
    project_version,
)
from tests.release.tree import machine_requirements, make_tree
from tests.sbom import RELEASE, bill, locked

LEFT = """
Left for a person, in this order:
  1. Run ./dev gate on this commit, and read the page that it writes.
  2. Put the addresses of the project into [project.urls] of pyproject.toml and .github/ISSUE_TEMPLATE/config.yml, and
     build again.
  3. Sign SHA256SUMS, and the tag: git tag --sign v{version} {commit}
  4. Publish the wheel and the sdist in an index of packages, and the image in a registry.
  5. Publish the Debian package, waltz-{version}-deploy.tar.gz, the bill of materials and the signed sums beside the tag.
     Unpack waltz-{version}-docs.tar.gz into a folder of its own beside those of earlier versions.
  6. Replace the name waltz:{version} in compose.yaml and in the manifests by that of the registry, with its digest.
  7. Install each of them from where it was published, and run the tutorial.
Not run here: a Kubernetes cluster, a container engine, a registry.
"""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="./dev release", description="Build everything that is published of a commit.")
    parser.add_argument("--packages-only", action="store_true", help="only wheel, sdist, bill of materials and sums")
    only_packages = parser.parse_args(arguments).packages_only
    commit = git("rev-parse", "HEAD")
    if git("status", "--porcelain", "--untracked-files=no"):
        print("Files were changed since the last commit; the release is made without these changes.", file=sys.stderr)
    shutil.rmtree(RELEASE, ignore_errors=True)
    RELEASE.mkdir(parents=True)
    build(commit, RELEASE, only_packages=only_packages)
    version = project_version()
    print(LEFT.format(version=version, commit=commit[:12]))
    return 0


def build(commit: str, target: Path, *, only_packages: bool = False, has_site: bool = True) -> None:
    """Write the artefacts of a commit into an empty folder; without `has_site` all but the site of the documentation."""
    seconds = commit_seconds(commit)
    with tempfile.TemporaryDirectory(prefix="waltz-release-") as name:
        work = Path(name)
        source = check_out(commit, work / "source")
        project = tomllib.loads((source / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        version = project["version"]
        sdist = build_sdist(source, work / "sdist", seconds)
        wheel = build_wheel_of_sdist(sdist, work / "wheel", seconds)
        shutil.copy(sdist, target)
        shutil.copy(wheel, target)
        lock = locked((source / "requirements.lock").read_text(encoding="utf-8"))
        (target / "waltzd.cdx.json").write_text(json.dumps(bill(project, lock), indent=2) + "\n", encoding="utf-8")
        (target / "requirements.txt").write_text(machine_requirements(), encoding="utf-8")
        (target / f"waltz-{version}-deploy.tar.gz").write_bytes(packed_folder(source / "configs", "waltz", seconds))
        if not only_packages:
            tree = make_tree(wheel, work / "tree")
            build_image(tree, version, commit, fetch_base(work / "base"), target, seconds)
            build_debian_package(tree, version, target, seconds)
        if not only_packages and has_site:
            site = build_site(source)
            (target / f"waltz-{version}-docs.tar.gz").write_bytes(packed_folder(site, f"waltz-{version}", seconds))
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted(target.iterdir())]
    (target / "SHA256SUMS").write_text("".join(sums), encoding="utf-8")
    for path in sorted(target.iterdir()):
        print(f"{path.stat().st_size:>12,}  {path.name}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The image: three layers that a program writes, without a daemon and without a base image.

The layers are a Python with the libraries of Debian 12 that it loads, then the packages that Waltz stands on, then Waltz.
There is no shell in it. It runs as a user without rights, on a file system that may be read-only. The file is an OCI
layout that `docker load` reads, too."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import subprocess
import tarfile
from pathlib import Path
from typing import Any

from tests.release.packages import archived
from tests.release.tree import HOME, PYTHON

USER = 65532
BASE = (
    f"python{PYTHON}-minimal", f"libpython{PYTHON}-minimal", f"libpython{PYTHON}-stdlib", "libc6", "libgcc-s1", "libcrypt1",
    "libstdc++6", "libssl3", "libexpat1", "zlib1g", "libffi8", "libbz2-1.0", "liblzma5", "libuuid1", "netbase", "tzdata",
)  # fmt: skip
"""Packages of Debian that are in the first layer."""
_LEFT_OUT = (
    "usr/share/man/",
    "usr/share/locale/",
    "usr/share/lintian/",
    "usr/share/bash-completion/",
    "usr/share/binfmts/",
)
_MERGED = {"lib": "usr/lib", "lib64": "usr/lib64", "bin": "usr/bin", "sbin": "usr/sbin"}
Files = dict[str, tuple[tarfile.TarInfo, bytes]]
"""Files of a layer by path."""


def fetch_base(folder: Path) -> list[Path]:
    """Download the packages of the first layer, which apt checks; return them."""
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(["apt-get", "download", *BASE], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stderr}\nNext: run `apt-get update`, then try again."
    return sorted(folder.glob("*.deb"))


def build_image(tree: Path, version: str, commit: str, base: list[Path], target: Path, seconds: int) -> Path:
    """Build `waltz-VERSION.oci.tar` of a folder with `opt/waltz` and the packages of the first layer."""
    everything = _files_of(tree)
    ours = {name: one for name, one in everything.items() if _is_ours(name)}
    others = {name: one for name, one in everything.items() if name not in ours}
    layers = [archived([files[name] for name in sorted(files)], seconds) for files in (_base_files(base), others, ours)]
    image = target / f"waltz-{version}.oci.tar"
    image.write_bytes(_layout(layers, version, commit, seconds))
    return image


def _is_ours(name: str) -> bool:
    below = name.removeprefix(f"{HOME}/lib/")
    return name.startswith(f"{HOME}/bin") or below.startswith(("waltzd", "waltzctl", "pyspark_waltz"))


def _entry(name: str, kind: bytes = tarfile.REGTYPE, mode: int = 0o644, user: int = 0) -> tarfile.TarInfo:
    found = tarfile.TarInfo(name)
    found.type, found.mode, found.uid, found.gid = kind, mode, user, user
    return found


def _files_of(folder: Path) -> Files:
    found: Files = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_dir():
            found[name] = _entry(name, tarfile.DIRTYPE, 0o755), b""
        else:
            found[name] = _entry(name, mode=path.stat().st_mode & 0o777), path.read_bytes()
    return found


def _base_files(packages: list[Path]) -> Files:
    """Return the files of Debian packages, all below `usr` as in an installed system, and those that a user needs."""
    found: Files = {}
    for package in packages:
        raw = subprocess.run(["dpkg-deb", "--fsys-tarfile", package], capture_output=True, check=True).stdout
        with tarfile.open(fileobj=io.BytesIO(raw)) as archive:
            for one in archive:
                name = one.name.removeprefix("./").rstrip("/")
                first, _, rest = name.partition("/")
                if first in _MERGED:
                    name = f"{_MERGED[first]}/{rest}".rstrip("/")
                is_doc = name.startswith("usr/share/doc/") and not (one.isdir() or name.endswith("/copyright"))
                if not name or name == "." or is_doc or name.startswith(_LEFT_OUT):
                    continue
                file = archive.extractfile(one) if one.isfile() else None
                one.name = name
                found[name] = one, b"" if file is None else file.read()
    for name, place in _MERGED.items():
        link = _entry(name, tarfile.SYMTYPE, 0o777)
        link.linkname = place
        found[name] = link, b""
    folders = [(name, 0o755, 0) for name in ("dev", "etc", "proc", "sys", "var", "var/lib")]
    for name, mode, user in (*folders, ("tmp", 0o1777, 0), ("var/lib/waltz", 0o750, USER)):
        found[name] = _entry(name, tarfile.DIRTYPE, mode, user), b""
    users = f"root:x:0:0:root:/:/usr/sbin/nologin\nwaltz:x:{USER}:{USER}:Waltz:/var/lib/waltz:/usr/sbin/nologin\n"
    for name, text in (("etc/passwd", users), ("etc/group", f"root:x:0:\nwaltz:x:{USER}:\n")):
        found[name] = _entry(name), text.encode()
    return found


def _layout(raw: list[bytes], version: str, commit: str, seconds: int) -> bytes:
    """Return the archive of an image with these layers."""
    layers = [gzip.compress(layer, compresslevel=6, mtime=0) for layer in raw]
    created = subprocess.run(
        ["date", "--utc", f"--date=@{seconds}", "+%Y-%m-%dT%H:%M:%SZ"], capture_output=True, text=True, check=True
    ).stdout.strip()
    configuration = {
        "architecture": "amd64",
        "os": "linux",
        "created": created,
        "config": {
            "User": f"{USER}:{USER}",
            "Entrypoint": ["/opt/waltz/bin/waltzd"],
            "Env": ["PATH=/opt/waltz/bin:/usr/bin"],
            "WorkingDir": "/var/lib/waltz",
            "Volumes": {"/var/lib/waltz": {}},
            "Healthcheck": {"Test": ["CMD", "/opt/waltz/bin/waltz-healthy"], "Interval": 10**10, "Timeout": 6 * 10**9},
            "Labels": {
                "org.opencontainers.image.title": "waltz",
                "org.opencontainers.image.version": version,
                "org.opencontainers.image.revision": commit,
                "org.opencontainers.image.licenses": "Apache-2.0",
            },
        },
        "rootfs": {"type": "layers", "diff_ids": [_digest(layer) for layer in raw]},
        "history": [{"created": created, "created_by": what} for what in ("Debian 12", "requirements.lock", "waltzd")],
    }
    blobs = {_digest(layer): layer for layer in layers}
    config = _json(configuration)
    blobs[_digest(config)] = config
    manifest = _json(
        {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": _descriptor("application/vnd.oci.image.config.v1+json", config),
            "layers": [_descriptor("application/vnd.oci.image.layer.v1.tar+gzip", layer) for layer in layers],
        }
    )
    blobs[_digest(manifest)] = manifest
    reference = {"org.opencontainers.image.ref.name": version, "io.containerd.image.name": f"waltz:{version}"}
    described = _descriptor("application/vnd.oci.image.manifest.v1+json", manifest) | {"annotations": reference}
    place = "blobs/sha256/{}".format
    files = {place(digest.removeprefix("sha256:")): content for digest, content in blobs.items()}
    files["oci-layout"] = _json({"imageLayoutVersion": "1.0.0"})
    files["index.json"] = _json({"schemaVersion": 2, "manifests": [described]})
    names = [place(_digest(layer).removeprefix("sha256:")) for layer in layers]
    loaded = {"Config": place(_digest(config).removeprefix("sha256:")), "RepoTags": [f"waltz:{version}"], "Layers": names}
    files["manifest.json"] = _json([loaded])
    return archived([(_entry(name), files[name]) for name in sorted(files)], seconds)


def _digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _descriptor(kind: str, content: bytes) -> dict[str, Any]:
    return {"mediaType": kind, "digest": _digest(content), "size": len(content)}

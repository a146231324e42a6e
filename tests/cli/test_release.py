"""What `./dev release` makes of a commit: the same bytes each time, and each artefact installed and run as far as it can be
here. Wheel and sdist in empty environments: test_package.py. No container engine is here, no Kubernetes cluster."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import resources
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from jsonschema import Draft202012Validator

from tests.json_schemas import command_words
from tests.process.zookeeper import free_port
from tests.release.__main__ import build
from tests.release.debian import SETTINGS, UNITS
from tests.release.image import USER, build_image
from tests.release.packages import ROOT, packed_folder, project_version, unpack
from tests.release.tree import PROGRAMS
from tests.sbom import locked, plain
from waltzd.daemon.config import ServerConfig, StorageConfig
from waltzd.daemon.config_file import load

CONFIGS = ROOT / "configs"
KEY = "00112233-4455-6677-8899-aabbccddeeff"
SECONDS = 1_800_000_000
KUBERNETES = ("1.32", "1.37")
"""Versions of Kubernetes by whose schemas the manifests are checked: an older and the newest one."""


def run(*command: object, **options: Any) -> str:
    words = [str(word) for word in command]
    done: subprocess.CompletedProcess[str] = subprocess.run(words, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, (words, done.stdout, done.stderr)
    return done.stdout


def contents(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


# -- the same bytes ----------------------------------------------------------------------------------------------------


def small_tree(folder: Path) -> Path:
    for name, text in (
        ("bin/waltzd", "#!/usr/bin/python3\n"),
        ("lib/waltzd/a.py", "a = 1\n"),
        ("lib/rich/b.py", "b = 2\n"),
    ):
        path = folder / "opt" / "waltz" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    (folder / "opt/waltz/bin/waltzd").chmod(0o755)
    return folder


def test_an_image_is_the_same_bytes_and_its_digests_are_right(tmp_path: Path) -> None:
    tree = small_tree(tmp_path / "tree")
    image = build_image(tree, "0.1.0", "abc", [], tmp_path, SECONDS)
    before = image.read_bytes()
    os.utime(tree / "opt/waltz/lib/rich/b.py", (1, 1))
    assert build_image(tree, "0.1.0", "abc", [], tmp_path, SECONDS).read_bytes() == before
    with tarfile.open(image) as archive:
        files = {one.name: archive.extractfile(one).read() for one in archive}  # type: ignore[union-attr]
    for name, content in files.items():
        if name.startswith("blobs/"):
            assert name == f"blobs/sha256/{hashlib.sha256(content).hexdigest()}"
    (described,) = json.loads(files["index.json"])["manifests"]
    manifest = json.loads(files["blobs/sha256/" + described["digest"].removeprefix("sha256:")])
    config = json.loads(files["blobs/sha256/" + manifest["config"]["digest"].removeprefix("sha256:")])
    assert config["config"]["User"] == f"{USER}:{USER}", "not root"
    assert config["config"]["Healthcheck"]["Test"] == ["CMD", "/opt/waltz/bin/waltz-healthy"]
    assert len(manifest["layers"]) == len(config["rootfs"]["diff_ids"]) == len(config["history"]) == 3
    (loaded,) = json.loads(files["manifest.json"])
    assert loaded["Layers"] == [f"blobs/sha256/{one['digest'].removeprefix('sha256:')}" for one in manifest["layers"]]
    assert all(one["size"] == len(files[f"blobs/sha256/{one['digest'][7:]}"]) for one in manifest["layers"])


# -- installed and run -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything that is made of the commit, without the site."""
    if os.geteuid() != 0 or shutil.which("dpkg-deb") is None or shutil.which("unshare") is None:
        pytest.skip("needs root, and Debian's tools")
    target = tmp_path_factory.mktemp("release")
    try:
        build("HEAD", target, has_site=False)
    except AssertionError as error:
        if re.search("Unable to (fetch|locate)|NewConnectionError|NameResolutionError", str(error)):
            pytest.skip("no index of packages can be reached from here")
        raise
    return target


@pytest.fixture(scope="module")
def unpacked(release: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root of the image, as an engine makes it of the layers."""
    folder = tmp_path_factory.mktemp("image")
    run("tar", "--extract", "--file", release / f"waltz-{project_version()}.oci.tar", "--directory", folder)
    (loaded,) = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    root = folder / "root"
    for layer in loaded["Layers"]:
        with tarfile.open(folder / layer) as archive:
            unpack(archive, root)
    return root


PACKAGES = ("waltzd-{0}.tar.gz", "waltzd-{0}-py3-none-any.whl", "waltz-{0}-deploy.tar.gz", "requirements.txt",
            "waltzd.cdx.json")  # fmt: skip


@pytest.mark.slow
def test_a_commit_gives_the_same_packages_each_time(release: Path, tmp_path: Path) -> None:
    build("HEAD", tmp_path, only_packages=True)
    again = contents(tmp_path)
    assert set(again) == {*(name.format(project_version()) for name in PACKAGES), "SHA256SUMS"}
    del again["SHA256SUMS"]  # there are more files in the other folder
    assert again.items() <= contents(release).items()


@pytest.mark.slow
def test_the_sums_are_those_of_the_files(release: Path) -> None:
    run("sha256sum", "--check", "--strict", "SHA256SUMS", cwd=release)
    lines = (release / "SHA256SUMS").read_text(encoding="utf-8").splitlines()
    assert {line.split()[1] for line in lines} == {path.name for path in release.iterdir()} - {"SHA256SUMS"}


@pytest.mark.slow
def test_the_bill_of_materials_and_the_requirements_name_what_the_image_and_the_package_have(
    release: Path, unpacked: Path, tmp_path: Path
) -> None:
    package = tmp_path / "package"
    run("dpkg-deb", "--extract", release / f"waltz_{project_version()}_amd64.deb", package)
    listed = json.loads((release / "waltzd.cdx.json").read_text(encoding="utf-8"))["components"]
    wanted = locked((release / "requirements.txt").read_text(encoding="utf-8"))
    for root in (unpacked, package):
        found = distributions(path=[str(root / "opt/waltz/lib")])
        installed = {plain(one.name): one.version for one in found}
        assert installed.pop("waltzd") == project_version()
        assert len(installed) > 10
        assert installed.items() <= {(one["name"], one["version"]) for one in listed}
        assert installed.items() <= {(one.name, one.version) for some in wanted.values() for one in some}
        missing = [one for name in wanted.keys() - installed.keys() for one in wanted[name]]
        assert [one.name for one in missing if "sys_platform ==" not in one.marker] == [], "for other systems only"


@pytest.mark.long  # the site takes a quarter of a minute, as in test_site.py
def test_the_site_of_the_commit_is_in_an_archive_that_says_its_version(tmp_path: Path) -> None:
    version = project_version()
    build("HEAD", tmp_path)
    with tarfile.open(tmp_path / f"waltz-{version}-docs.tar.gz") as archive:
        names = set(archive.getnames())
        overview = archive.extractfile(f"waltz-{version}/llms.txt")
        assert overview is not None
        assert overview.read().startswith(f"# Waltz {version}\n".encode())
    assert {f"waltz-{version}/{page}/index.html" for page in ("tutorial", "upgrade", "api-clients")} <= names


@contextmanager
def storage_in(root: Path, data: Path, port: int) -> Iterator[subprocess.Popen[str]]:
    """A storage in a root that is read-only, as a user without rights."""
    mounts = (
        'mount --bind "$1" "$1"',
        'mount --rbind /dev "$1/dev"',
        'mount -o remount,bind,ro "$1"',
        'mount -t tmpfs tmpfs "$1/tmp"',
        'mount --bind "$2" "$1/var/lib/waltz"',
    )
    program = "/opt/waltz/bin/waltzd storage --config /var/lib/waltz/storage.yml"
    script = " && ".join([*mounts, f'exec chroot --userspec={USER}:{USER} "$1" {program}'])
    data.mkdir()
    os.chown(data, USER, USER)
    settings = {"directory": "/var/lib/waltz/storage", "cluster_key": KEY, "partitions": 4, "free_bytes_min": 0}
    settings |= {"listen": "127.0.0.1:0", "admin_listen": "127.0.0.1:0", "http_listen": f"127.0.0.1:{port}"}
    (data / "storage.yml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    command = ["unshare", "--mount", "sh", "-c", script, "sh", str(root), str(data)]
    with (
        (data / "log").open("w") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.slow
def test_a_storage_runs_in_the_image_without_rights_on_a_read_only_root(unpacked: Path, tmp_path: Path) -> None:
    port, data = free_port(), tmp_path / "data"
    with storage_in(unpacked, data, port) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("waltzd storage is ready"), (data / "log").read_text()
        status = Path(f"/proc/{process.pid}/status").read_text()
        assert f"Uid:\t{USER}\t{USER}" in status
        healthy = ["chroot", f"--userspec={USER}:{USER}", unpacked, "/opt/waltz/bin/waltz-healthy"]
        run(*healthy, f"http://127.0.0.1:{port}/healthz")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, (data / "log").read_text()
    assert {path.name for path in unpacked.iterdir()} >= {"opt", "usr", "etc", "tmp", "var"}
    assert (data / "storage").is_dir()
    with pytest.raises(AssertionError, match="not healthy"):
        run(*healthy, f"http://127.0.0.1:{port}/healthz")


@pytest.mark.slow
def test_every_program_of_the_image_starts(unpacked: Path) -> None:
    chroot = ["chroot", f"--userspec={USER}:{USER}", unpacked]
    assert {path.name for path in (unpacked / "opt/waltz/bin").iterdir()} == set(PROGRAMS)
    assert run(*chroot, "/opt/waltz/bin/waltzd", "--version") == f"waltzd, version {project_version()}\n"
    assert "Usage: waltzctl" in run(*chroot, "/opt/waltz/bin/waltzctl", "--help")
    modules = "waltzd.server.command, waltzd.storage.command, waltzd.daemon.http, obstore, kazoo, ssl, uuid, zoneinfo"
    imports = f"import sys; sys.path.insert(0, '/opt/waltz/lib'); import {modules}"
    run(*chroot, "/usr/bin/python3.11", "-I", "-c", imports)
    assert not (unpacked / "bin/sh").exists(), "there is no shell in it"


@pytest.mark.slow
def test_the_debian_package_is_installed_into_a_fresh_root(release: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "var/lib/dpkg/info").mkdir(parents=True)
    (root / "var/lib/dpkg/updates").mkdir()
    (root / "etc").mkdir()
    (root / "var/lib/dpkg/status").touch()
    package = release / f"waltz_{project_version()}_amd64.deb"
    # What it depends on is not in that root, and no shell either: its script works from outside.
    dpkg = ["dpkg", f"--root={root}", "--force-script-chrootless", "--force-depends", f"--log={tmp_path}/dpkg.log"]
    run(*dpkg, "--install", package)
    assert "install ok installed" in (root / "var/lib/dpkg/status").read_text()
    users = (root / "etc/passwd").read_text()
    for user in ("waltz-storage", "waltz-server"):
        (entry,) = [line.split(":") for line in users.splitlines() if line.startswith(f"{user}:")]
        assert entry[6] == "/usr/sbin/nologin"
    for name in UNITS:
        assert (root / "usr/lib/systemd/system" / name).read_bytes() == (CONFIGS / name).read_bytes()
        programs = re.findall(r"/opt/waltz/bin/\w+", (CONFIGS / name).read_text(encoding="utf-8"))
        assert programs
        assert all(os.access(root / program[1:], os.X_OK) for program in programs)
    for path in root.joinpath("opt/waltz").rglob("*"):
        status = path.stat()
        assert (status.st_uid, status.st_gid, status.st_mode & 0o022) == (0, 0, 0), path
    settings = root / "etc/waltz/storage.yml"
    settings.write_text("directory: /data\n", encoding="utf-8")
    run(*dpkg, "--install", package)
    assert settings.read_text(encoding="utf-8") == "directory: /data\n", "an upgrade keeps the settings"
    run(*dpkg, "--remove", "waltz")
    assert {path.name for path in (root / "etc/waltz").iterdir()} == set(SETTINGS), "until it is purged"
    run(*dpkg, "--purge", "waltz")
    assert not (root / "etc/waltz").exists()
    wanted = run("dpkg-deb", "--field", package, "Depends")
    assert "python3.11" in wanted


# -- who asks ----------------------------------------------------------------------------------------------------------


def vendored(name: str) -> Draft202012Validator:
    """Return the validator of a published schema that `check-jsonschema` brings."""
    text = resources.files("check_jsonschema").joinpath(f"builtin_schemas/vendor/{name}.json").read_text(encoding="utf-8")
    return Draft202012Validator(json.loads(text))


def test_issue_forms_keep_to_the_published_schemas_and_name_commands_that_exist() -> None:
    forms = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / ".github/ISSUE_TEMPLATE").iterdir()}
    assert set(forms) == {"bug.yml", "proposal.yml", "config.yml"}
    for name, text in forms.items():
        found = yaml.safe_load(text)
        validator = vendored("github-issue-config" if name == "config.yml" else "github-issue-forms")
        assert [f"{name} {list(error.path)}: {error.message}" for error in validator.iter_errors(found)] == []
        assert not validator.is_valid({**found, "boddy": 1} if name == "config.yml" else {**found, "body": []})
        for words in re.findall(r"`waltzctl ([a-z -]+)", text):
            assert words.startswith("--") or command_words(words.split()), words
        assert all((ROOT / page).exists() for page in re.findall(r"(?<!/)\b(?:docs/[\w-]+(?:\.md)?|[A-Z]+\.md)", text))


# -- what starts them --------------------------------------------------------------------------------------------------


def check_settings(kind: type[Any], text: str, folder: Path) -> None:
    path = folder / "settings.yml"
    path.write_text(text, encoding="utf-8")
    load(str(path), kind)


def test_compose_starts_daemons_that_find_each_other(tmp_path: Path) -> None:
    found = yaml.safe_load((CONFIGS / "compose.yaml").read_text(encoding="utf-8"))
    services: Mapping[str, Any] = found["services"]
    daemons = {name: one for name, one in services.items() if one["image"].startswith("waltz:")}
    assert len(daemons) == 6
    assert {one["image"] for one in daemons.values()} == {f"waltz:{project_version()}"}
    for name, one in daemons.items():
        assert (one["read_only"], one["user"], one["cap_drop"]) == (True, f"{USER}:{USER}", ["ALL"]), name
        assert one.get("depends_on", {}).keys() <= services.keys()
        for config in one.get("configs", []):
            kind = StorageConfig if config["source"] == "storage" else ServerConfig
            check_settings(kind, found["configs"][config["source"]]["content"], tmp_path)
            assert one["command"][2] == config["target"]
        for volume in one.get("volumes", []):
            assert volume.partition(":")[0] in found["volumes"]
    given = [word for word in daemons["create"]["command"] if word.startswith("--storage=")]
    assert [word.partition("=")[2].partition("=")[0] for word in given] == sorted(
        name for name in daemons if "storage" in name
    )
    for number in (1, 2):
        settings = yaml.safe_load(found["configs"][f"server-{number}"]["content"])
        assert (settings["name"], settings["advertise"]) == (f"server-{number}", f"server-{number}:55180")


def test_compose_keeps_to_the_published_schema() -> None:
    validator = vendored("compose-spec")
    found = yaml.safe_load((CONFIGS / "compose.yaml").read_text(encoding="utf-8"))
    assert [f"{list(error.path)}: {error.message}" for error in validator.iter_errors(found)] == []
    found["services"]["create"]["read_onli"] = True
    assert not validator.is_valid(found), "a mistake is seen"


def manifests() -> list[dict[str, Any]]:
    """What kustomize makes, or the files themselves where it is not installed."""
    folder = CONFIGS / "kubernetes"
    done = None
    if shutil.which("kubectl") is not None:
        done = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, check=False)
    if done is not None and done.returncode == 0:
        return list(yaml.safe_load_all(done.stdout))
    names = yaml.safe_load((folder / "kustomization.yaml").read_text(encoding="utf-8"))["resources"]
    return [one for name in names for one in yaml.safe_load_all((folder / name).read_text(encoding="utf-8"))]


def test_manifests_keep_to_the_schemas_of_kubernetes() -> None:
    for version in KUBERNETES:
        for one in manifests():
            kubernetes_validate.validate(one, version, strict=True)
    one["spec"]["replica"] = 3
    with pytest.raises(kubernetes_validate.ValidationError, match="replica"):
        kubernetes_validate.validate(one, KUBERNETES[0], strict=True)


@pytest.mark.parametrize("kind", ["storage", "server"])
def test_the_manifests_fit_together(kind: str, tmp_path: Path) -> None:
    found = {(one["kind"], one["metadata"]["name"]): one for one in manifests()}
    name, labels = f"waltz-{kind}", {"app": f"waltz-{kind}"}
    service, budget, stateful = (found[which, name]["spec"] for which in ("Service", "PodDisruptionBudget", "StatefulSet"))
    assert service["clusterIP"] == "None"
    assert service["selector"] == budget["selector"]["matchLabels"] == stateful["selector"]["matchLabels"] == labels
    assert budget["maxUnavailable"] == 1, "a majority stays"
    assert stateful["serviceName"] == name
    assert stateful["template"]["metadata"]["labels"] == labels
    pod = stateful["template"]["spec"]
    (container,), (settings,) = pod["containers"], pod["initContainers"]
    assert container["args"] == [kind, "--config", f"/run/waltz/{kind}.yml"]
    for one in (container, settings):
        assert one["image"].partition(":")[0] == "waltz"
        assert one["securityContext"]["readOnlyRootFilesystem"] is True
        mounted = {mount["name"] for mount in one["volumeMounts"]}
        claimed = {claim["metadata"]["name"] for claim in stateful.get("volumeClaimTemplates", [])}
        assert mounted <= claimed | {volume["name"] for volume in pod["volumes"]}
    assert pod["securityContext"]["runAsUser"] == USER
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    probes = {which: container[f"{which}Probe"]["httpGet"] for which in ("startup", "liveness", "readiness")}
    assert {one["path"] for one in probes.values()} == {"/healthz", "/readyz"}
    assert all(one["port"] in ports for one in probes.values())
    text = (CONFIGS / "kubernetes" / f"{kind}.yml").read_text(encoding="utf-8")
    wanted = yaml.safe_load(text)
    assert [
        int(str(wanted[one]).rpartition(":")[2]) for one in ("listen", "admin_listen", "stream_port", "http_listen")
    ] == (list(ports.values()))
    for line in re.findall(r"^tls_.*\n", text, re.M):
        text = text.replace(line, "")
    script = tmp_path / "settings.py"
    script.write_text(settings["args"][0].replace("/etc/waltz", str(tmp_path)).replace("/run/waltz", str(tmp_path / "run")))
    (tmp_path / "run").mkdir()
    (tmp_path / f"{kind}.yml").write_text(text + "plaintext: anywhere\n", encoding="utf-8")
    run("python3", script, env={**os.environ, "POD": f"waltz-{kind}-0"})
    made = (tmp_path / "run" / f"{kind}.yml").read_text(encoding="utf-8")
    assert "POD" not in made.replace("# Settings of every server. The word", "").replace("becomes the name", "")
    check_settings(StorageConfig if kind == "storage" else ServerConfig, made, tmp_path)


def test_what_is_deployed_is_in_one_archive() -> None:
    raw = packed_folder(CONFIGS, "waltz", SECONDS)
    assert raw == packed_folder(CONFIGS, "waltz", SECONDS)

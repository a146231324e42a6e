"""Which cluster is meant: by options, variables, contexts, or the directory; and contexts that somebody edited."""

from __future__ import annotations

from pathlib import Path
from uuid import UUID

import pytest

from waltzctl.shell.blueprint import ZOOKEEPER, Blueprint, save_blueprint
from waltzctl.shell.cluster_target import (
    LOCAL_DIRECTORY,
    ClusterTarget,
    Context,
    Contexts,
    contexts_path,
    load_contexts,
    resolve,
    save_contexts,
    unknown,
)
from waltzd.errors import BadArgument, WaltzError
from waltzd.errors.operations import NoClusterNamed, NoLocalCluster, NoSuchName, NotesDamaged

VARIABLES = ("CONTEXT", "DIRECTORY", "COORDINATOR", "ROOT", "TLS_CERTIFICATE", "TLS_KEY", "TLS_CA")
PAYMENTS = Context(coordinator="zk:2181", root="/waltz/payments", protected=True)


@pytest.fixture(autouse=True)
def nothing_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty directory, no variables, and contexts of our own."""
    for name in VARIABLES:
        monkeypatch.delenv(f"WALTZ_{name}", raising=False)
    monkeypatch.setenv("WALTZ_CONTEXTS", str(tmp_path / "contexts.yml"))
    monkeypatch.chdir(tmp_path)


def local_cluster(directory: Path, port: int = 2181) -> str:
    directory.mkdir()
    drawn = Blueprint(key=UUID(int=7), partitions=4, replication=0, storages=0, servers=0, ports={ZOOKEEPER: (port,)})
    save_blueprint(directory, drawn)
    return str(directory)


def told(target: ClusterTarget) -> tuple[str, str]:
    return target.hosts, target.root


# -- who is asked first ------------------------------------------------------------------------------------------------


def test_nobody_said_anything() -> None:
    with pytest.raises(NoClusterNamed) as refused:
        resolve({})
    assert refused.value.exit_code == 2
    assert "--coordinator" in refused.value.detail_next_step


def test_an_option_before_a_variable_before_the_context_before_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local_cluster(tmp_path / LOCAL_DIRECTORY, 1)
    target = resolve({})
    assert (target.hosts, target.directory, target.name) == ("127.0.0.1:1", Path(LOCAL_DIRECTORY), LOCAL_DIRECTORY)
    assert target.origins["directory"][1] == "the cluster that `waltzctl up` made here"

    save_contexts(Contexts(current="payments", named={"payments": PAYMENTS}))
    target = resolve({})
    assert (told(target), target.name, target.is_protected) == (("zk:2181", "/waltz/payments"), "payments", True)
    assert target.origins["coordinator"] == ("zk:2181", "context payments")
    assert target.origins["context"] == ("payments", str(tmp_path / "contexts.yml"))

    monkeypatch.setenv("WALTZ_COORDINATOR", "variable:1")
    target = resolve({})
    assert (told(target), target.name, target.is_protected) == (("variable:1", "/waltz"), "variable:1/waltz", False)
    assert target.origins == {"coordinator": ("variable:1", "WALTZ_COORDINATOR"), "root": ("/waltz", "the default")}

    target = resolve({"coordinator": "option:1"})
    assert told(target) == ("option:1", "/waltz")
    assert target.origins["coordinator"] == ("option:1", "--coordinator")


def test_each_value_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    save_contexts(Contexts(current="payments", named={"payments": PAYMENTS}))
    monkeypatch.setenv("WALTZ_ROOT", "/variable")
    target = resolve({})
    assert told(target) == ("zk:2181", "/variable")
    assert target.origins["root"] == ("/variable", "WALTZ_ROOT")
    assert told(resolve({"root": "/option"})) == ("zk:2181", "/option")


@pytest.mark.parametrize("variable", ["WALTZ_COORDINATOR", "WALTZ_DIRECTORY", "WALTZ_CONTEXT", "WALTZ_ROOT"])
def test_who_names_a_context_by_an_option_means_it(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    """A forgotten variable must not lead to another cluster."""
    save_contexts(Contexts(current=None, named={"payments": PAYMENTS}))
    monkeypatch.setenv(variable, "/elsewhere")
    target = resolve({"context": "payments"})
    assert (told(target), target.is_protected) == (("zk:2181", "/waltz/payments"), True)
    assert variable not in {origin for _, origin in target.origins.values()}


def test_a_variable_names_a_context(monkeypatch: pytest.MonkeyPatch) -> None:
    save_contexts(Contexts(current="other", named={"payments": PAYMENTS, "other": Context(coordinator="other:1")}))
    monkeypatch.setenv("WALTZ_CONTEXT", "payments")
    assert resolve({}).origins["context"] == ("payments", "WALTZ_CONTEXT")
    assert resolve({"context": "other"}).hosts == "other:1"
    assert resolve({"coordinator": "option:1"}).name == "option:1/waltz"


def test_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = local_cluster(tmp_path / "trial", 5)
    monkeypatch.setenv("WALTZ_COORDINATOR", "variable:1")
    target = resolve({"directory": given})
    assert (told(target), target.directory, target.tls) == (("127.0.0.1:5", "/waltz"), Path(given), None)
    assert target.origins["coordinator"] == ("127.0.0.1:5", f"{given}/cluster.json")
    monkeypatch.setenv("WALTZ_DIRECTORY", given)
    assert resolve({"coordinator": "option:1"}).hosts == "option:1"
    with pytest.raises(BadArgument, match="WALTZ_DIRECTORY and WALTZ_COORDINATOR name two clusters"):
        resolve({})
    with pytest.raises(NoLocalCluster):
        resolve({"directory": str(tmp_path)})
    save_contexts(Contexts(current="trial", named={"trial": Context(directory=given, protected=True)}))
    monkeypatch.delenv("WALTZ_DIRECTORY")
    monkeypatch.delenv("WALTZ_COORDINATOR")
    target = resolve({})
    assert (target.name, target.directory, target.is_protected) == ("trial", Path(given), True)
    assert target.origins["directory"] == (given, "context trial")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"context": "a", "coordinator": "b:1"}, "--context and --coordinator name 2 clusters"),
        ({"directory": "a", "coordinator": "b:1"}, "--directory and --coordinator name 2 clusters"),
        ({"directory": "a", "root": "/b"}, "--root with --directory"),
        ({"directory": "a", "tls_key": "b"}, "--tls-key with --directory"),
        ({"coordinator": "a:1", "tls_key": "b"}, "--tls-key without"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_options_that_cannot_both_be_meant(given: dict[str, str | None], said: str) -> None:
    with pytest.raises(BadArgument, match=said) as refused:
        resolve(given)
    assert "was contacted" in refused.value.detail_not_done


def test_certificates_are_from_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three files belong together; they are looked at, and these are not there."""
    context = Context(coordinator="zk:1", tls_certificate="/context/c", tls_key="/context/k", tls_ca="/context/a")
    save_contexts(Contexts(current="payments", named={"payments": context}))

    def opened(given: dict[str, str | None]) -> str:
        with pytest.raises(WaltzError) as refused:
            resolve(given)
        return refused.value.message

    assert "/context/c" in opened({})
    for name in ("tls_certificate", "tls_key", "tls_ca"):
        monkeypatch.setenv(f"WALTZ_{name.upper()}", f"/variable/{name}")
    assert "/variable/tls_certificate" in opened({})
    assert "/context/c" in opened({"context": "payments"}), "the certificate of the context that was named"
    assert "--tls-key without" in opened({"context": "payments", "tls_key": "/option/k"})
    assert "/variable/tls_certificate" in opened({"coordinator": "other:1"}), "one certificate may be good for many"


# -- the file ----------------------------------------------------------------------------------------------------------


def test_contexts_come_back_as_they_were() -> None:
    assert load_contexts() == Contexts(current=None, named={})
    contexts = Contexts(current="b", named={"a": Context(directory="/d"), "b": PAYMENTS})
    save_contexts(contexts)
    assert load_contexts() == contexts
    assert contexts_path().read_text() == (
        "current: b\ncontexts:\n  a:\n    directory: /d\n  b:\n    coordinator: zk:2181\n    root: /waltz/payments\n"
        "    protected: true\n"
    )


def test_where_contexts_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WALTZ_CONTEXTS")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    assert contexts_path() == tmp_path / "config" / "waltz" / "contexts.yml"
    save_contexts(Contexts(current=None, named={"a": PAYMENTS}))
    assert load_contexts().get("a") == PAYMENTS


@pytest.mark.parametrize("name", ["", "a/b", "ä", "-x", "a\nb"])
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(BadArgument, match="is not a name"):
        save_contexts(Contexts(current=None, named={name: PAYMENTS}))
    assert load_contexts().named == {}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"contexts: [", "is not valid"),
        (b"\xff", "not UTF-8"),
        (b"- a", "is not valid"),
        (b"contexts: [a]", "is not valid"),
        (b"contexts: {a: b}", "context a is not a mapping of settings"),
        (b"contexts: {a: {coordinater: b}}", "an unknown setting coordinater"),
        (b"contexts: {a: {coordinator: 5}}", "coordinator cannot be 5"),
        (b"contexts: {a: {coordinator: b, protected: 1}}", "protected cannot be 1"),
        (b"contexts: {a: {protected: true}}", "either a coordinator or the directory"),
        (b"contexts: {a: {coordinator: b, directory: c}}", "either a coordinator or the directory"),
        (b"contexts: {a: {directory: c, root: /d}}", "has its own root"),
        (b"contexts: {a: {coordinator: 2001-99-99}}", "is not valid"),
        (b"contexts: !!python/object:os.system {}", "is not valid"),
        (b"[" * 20_000, "is not valid"),
        (b"a: \0", "is not valid"),
        (rb'"\UFFFFFFFF"', "is not valid"),
    ],
    ids=lambda value: value[:40].decode("ascii", "replace") if isinstance(value, bytes) else "",
)
def test_a_damaged_file(text: bytes, said: str) -> None:
    contexts_path().write_bytes(text)
    with pytest.raises(NotesDamaged, match=said) as refused:
        resolve({})
    assert str(contexts_path()) in refused.value.message
    assert contexts_path().read_bytes() == text
    assert resolve({"coordinator": "a:1"}).hosts == "a:1", "who says which cluster needs no file"


def test_an_empty_file_has_no_contexts() -> None:
    for text in ("", "current:\ncontexts:\n", "# nothing\n"):
        contexts_path().write_text(text)
        assert load_contexts() == Contexts(current=None, named={})


def test_a_file_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("WALTZ_CONTEXTS", str(tmp_path / "file" / "contexts.yml"))
    with pytest.raises(WaltzError, match=r"contexts\.yml"):
        save_contexts(Contexts(current=None, named={"a": PAYMENTS}))


def test_names_that_are_not_there() -> None:
    save_contexts(Contexts(current="gone", named={"payments": PAYMENTS}))
    with pytest.raises(NoSuchName, match="there is no context gone"):
        resolve({})
    with pytest.raises(NoSuchName) as refused:
        resolve({"context": "payment"})
    assert (refused.value.exit_code, refused.value.detail_next_step) == (3, "did you mean payments?")
    assert unknown("server", "x", ["one", "two"]).detail_next_step == "there are: one, two"
    assert unknown("server", "x", []).detail_next_step == "there is no server yet"

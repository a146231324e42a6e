"""The tool as a whole: help, exit codes, examples, signals, pipes."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.example import examples
from tests.cli.replicas import make_replicas
from tests.process.daemon import Daemon
from waltzctl.local_cluster.local import LocalCluster
from waltzctl.main import COMMANDS
from waltzd.errors import EXIT_MEANING, explain
from waltzd.errors.operations import tree

Tool = Callable[..., Any]

OFFLINE = [
    ["verify-segments"], ["rebuild-index"], ["segment", "dump"], ["errors", "lookup"],
]  # fmt: skip
ONLINE = [["storage", name] for name in ("describe", "verify", "availability")]
"""In an order in which the examples of their help can run, one verb after the other."""
ELSEWHERE = {
    "cli/test_bench": [["bench", name] for name in ("append", "feed")],
    "cli/test_certificate_issue": [["certificate", "issue"]],
    "cli/test_client": [["client", name] for name in ("disconnect", "list")],
    "cli/test_cluster": [["create-cluster"]],
    "cli/test_channel": [["channel", name] for name in ("list", "set")],
    "cli/test_compare": [["partition", "compare"]],
    "cli/test_configuration": [["config", "validate"]],
    "cli/test_console": [["console"]],
    "cli/test_context": [["context", name] for name in ("add", "list", "use")],
    "cli/test_group": [
        *(["group", name] for name in ("create", "describe", "list", "remove")),
        *(["group", name] for name in ("reset", "resume", "set")),
        *(["group", "parked", name] for name in ("list", "replay")),
    ],
    "cli/test_looking": [
        ["doctor"],
        ["events"],
        ["health"],
        ["support", "bundle"],
        ["top"],
    ],
    "cli/test_membership": [["storage", name] for name in ("add", "list", "remove", "set")],
    "cli/test_metadata": [["cluster", f"{name}-metadata"] for name in ("load", "rebuild", "save")],
    "cli/test_ownership": [
        *(["partition", name] for name in ("preferred", "transfer")),
        *(["server", name] for name in ("drain", "list", "remove")),
    ],
    "cli/test_partition": [
        *(["partition", name] for name in ("assign", "auto-assign", "describe", "list")),
        *(["cluster", name] for name in ("delete", "finalize", "set")),
        ["history"],
    ],
    "cli/test_archive": [
        *(["archive", name] for name in ("heal", "sign", "status", "verify")),
    ],
    "cli/test_policy": [["policy", name] for name in ("explain", "set")],
    "cli/test_recover": [["storage", "recover"], ["partition", "rescue"]],
    "cli/test_status": [["status"]],
    "cli/test_wait": [["cluster", "wait"]],
    "cli/test_txn": [["lock", "explain"], *(["txn", name] for name in ("append", "get", "grep", "history", "tail"))],
    "cli/test_up": [[name] for name in ("down", "logs", "reset", "up")],
    "cli/test_restore": [["backup", "drill"], ["cluster", "restore"]],
    "spark/test_spark_export": [["spark-export"], *(["export", name] for name in ("status", "verify"))],
}
"""By the file of tests in which the examples of their help are run, or read."""
WORDS = [*OFFLINE, *ONLINE, *(words for some in ELSEWHERE.values() for words in some)]


@pytest.mark.parametrize("name", ELSEWHERE)
def test_examples_are_run_where_it_is_said(name: str) -> None:
    text = (Path(__file__).parents[1] / f"{name}.py").read_text(encoding="utf-8")
    assert "examples(" in text


def test_the_words_are_all_commands() -> None:
    named = [[*group.split(), name] for group, table in COMMANDS.items() for name, (where, _) in table.items() if where]
    assert sorted(named) == sorted(WORDS)


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys; from waltzctl.main import run; code = run(['--help']);"
        "heavy = {'numpy', 'rich', 'pydantic', 'grpc', 'yaml', 'waltzd.disk.real'};"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr);"
        "sys.exit(code)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "[]\n")
    assert "verify-segments" in ended.stdout


@pytest.mark.parametrize("words", [[], ["segment"], *WORDS], ids=" ".join)
def test_every_help_fits(waltzctl: Tool, words: list[str]) -> None:
    told = waltzctl(*words, "--help")
    assert told.code == 0
    assert max(map(len, told.out.splitlines())) <= 100
    assert not re.search(r"\bx[<>]=", told.out), "bounds are words"
    assert "-o, --output" in told.out or words in ([], ["segment"]), "scripts read what it says, too"


def test_own_options_come_first_and_shared_ones_in_sections(waltzctl: Tool) -> None:
    told = waltzctl("storage", "add", "--help").out
    sections = re.findall(r"^(\w+):$", told, re.MULTILINE)
    assert sections == ["Options", "Change", "Cluster", "Output"]
    options = told.partition("\nOptions:\n")[2]
    assert (
        options.index("--auto-assign") < options.index("--help") < options.index("--dry-run") < options.index("--context")
    )


def test_exit_codes_stand_in_one_place(waltzctl: Tool) -> None:
    told = waltzctl("errors", "lookup").out
    for code, meaning in (EXIT_MEANING | {130: "interrupted"}).items():
        assert f"{code}  {meaning}\n" in told
    codes = json.loads(waltzctl("errors", "lookup", "-o", "json").out)["exit_codes"]
    assert {one["code"]: one["meaning"] for one in codes} == EXIT_MEANING | {130: "interrupted"}
    assert "waltzctl errors lookup" in waltzctl("--help").out


@pytest.mark.parametrize("words", OFFLINE, ids=" ".join)
def test_every_example_of_the_help_runs(waltzctl: Tool, storage: Path, words: list[str]) -> None:
    for arguments in examples(waltzctl, words):
        done = waltzctl(*[argument.replace("/var/lib/waltz", str(storage)) for argument in arguments])
        assert (done.code, done.err) == (0, ""), arguments


def test_every_example_for_a_running_storage_runs(
    waltzctl: Tool, tmp_path: Path, live: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By an address, of a storage that no cluster knows; by a name, of one of the cluster."""
    monkeypatch.setenv("WALTZ_DIRECTORY", str(live.directory))
    with Daemon(tmp_path) as daemon:
        make_replicas(daemon.admin_listen, 0, 1)
        for words in ONLINE:
            for arguments in examples(waltzctl, words):
                done = waltzctl(*[argument.replace("127.0.0.1:55281", daemon.admin_listen) for argument in arguments])
                assert (done.code, done.err) == (0, ""), arguments


def test_a_mistyped_command_names_the_nearest(waltzctl: Tool) -> None:
    told = waltzctl("verify-segment")
    assert told.code == 2
    assert "Did you mean 'verify-segments'?" in told.err
    assert waltzctl("segment", "dmp").err.endswith("Did you mean 'dump'?\n")
    assert waltzctl("xyzzy").code == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ["verify-segments"],
        ["verify-segments", "--jobs", "-1", "."],
        ["verify-segments", "--jobs", "many", "."],
        ["verify-segments", "--key", "no-uuid", "."],
        ["verify-segments", "-o", "xml", "."],
        ["verify-segments", "--no-such-option", "."],
        ["rebuild-index"],
        ["segment", "dump"],
        ["segment", "dump", "--after", "-2", "x.seg"],
        ["segment", "dump", "--payload-bytes", "-1", "x.seg"],
    ],
    ids=" ".join,
)
def test_mistakes_on_the_command_line(waltzctl: Tool, arguments: list[str]) -> None:
    told = waltzctl(*arguments)
    assert (told.code, told.out) == (2, "")
    assert "Error: " in told.err


def test_bytes_that_are_no_text(waltzctl: Tool, monkeypatch: pytest.MonkeyPatch) -> None:
    def invoke(_context: object) -> None:
        "\udcff".encode()

    monkeypatch.setattr("waltzctl.main.cli.invoke", invoke)
    told = waltzctl("errors", "lookup", "\udcff")
    assert (told.code, told.err.splitlines()[0]) == (2, "W1001 \\udcff is not UTF-8")
    with pytest.raises(UnicodeEncodeError):
        waltzctl("errors", "lookup", "no mistake of the user")


def test_version() -> None:
    ended = subprocess.run([sys.executable, "-m", "waltzctl", "--version"], capture_output=True, text=True, check=True)
    assert re.fullmatch(r"waltzctl \d+\.\d+\.\d+\n", ended.stdout)


# -- errors ------------------------------------------------------------------------------------------------------------


def test_every_error_can_be_looked_up(waltzctl: Tool) -> None:
    for code, cls in tree().items():
        told = waltzctl("errors", "lookup", code)
        assert told.code == 0
        assert told.out.startswith(f"{code} {cls.__name__}\n")
        assert f"Exit code: {cls.exit_code}" in told.out
        (found,) = json.loads(waltzctl("errors", "lookup", code, "-o", "json").out)["errors"]
        assert (found["code"], found["next_step"]) == (code, explain(cls)[2])
    assert waltzctl("errors", "lookup", "w3001").out.startswith("W3001 DirectoryHeld")


def test_a_code_that_does_not_exist(waltzctl: Tool) -> None:
    told = waltzctl("errors", "lookup", "W9999")
    assert (told.code, told.out) == (3, "")
    assert "waltzctl errors lookup" in told.err


def test_the_list_has_them_all(waltzctl: Tool) -> None:
    shown = waltzctl("errors", "lookup").out.partition("\n\nExit codes:\n")[0]
    assert [line.split()[0] for line in shown.splitlines()] == list(tree())
    listed = json.loads(waltzctl("errors", "lookup", "-o", "json").out)
    assert listed["version"] == 1
    assert [row["code"] for row in listed["errors"]] == list(tree())


# -- pipes, signals, terminals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["segment dump -o hex {}/0/0000000000000000000.seg", "verify-segments {}"])
def test_a_reader_that_goes_away_is_met_with_silence(storage: Path, command: str) -> None:
    arguments = [sys.executable, "-m", "waltzctl", *shlex.split(command.format(storage))]
    read, write = os.pipe()
    os.close(read)
    ended = subprocess.run(arguments, stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_findings_still_count_when_nobody_reads(damaged: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    arguments = [sys.executable, "-m", "waltzctl", "verify-segments", "-o", "json", str(damaged)]
    ended = subprocess.run(arguments, stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)
    assert (ended.returncode, ended.stderr) == (8, b"")


_INTERRUPTED = """
import os, signal
import waltzctl.main
class Stop(waltzctl.main.LazyGroup):
    def invoke(self, ctx):
        os.kill(os.getpid(), signal.SIGINT)
        return super().invoke(ctx)
waltzctl.main.cli.__class__ = Stop
waltzctl.main.main()
"""


def test_an_interrupt_is_one_line_and_130(storage: Path) -> None:
    arguments = [sys.executable, "-c", _INTERRUPTED, "verify-segments", str(storage)]
    ended = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert ended.returncode == 130
    assert ended.stderr.strip() == "Interrupted. Data files are as they were."


@pytest.mark.parametrize("is_early", [False, True], ids=["while they work", "in the middle of the first hand-over"])
def test_an_interrupt_ends_the_workers_too(storage: Path, is_early: bool) -> None:
    """Workers are made to hang; the parent gets the signal alone, and nobody is left when it has ended."""
    early = (
        "    from concurrent.futures import ProcessPoolExecutor\n"
        "    submit = ProcessPoolExecutor.submit\n"
        "    def interrupted(*given):\n"
        "        submit(*given)\n"
        "        raise KeyboardInterrupt\n"
        "    ProcessPoolExecutor.submit = interrupted\n"
    )
    program = (
        "import os, signal, threading, time\n"
        "from waltzd.disk.real import RealDisk\n"
        "from waltzd.storage.offline.verify import run_on_segments\n"
        "if __name__ == '__main__':\n"
        "    def poke():\n"
        "        import multiprocessing\n"
        "        while len(multiprocessing.active_children()) < 2: time.sleep(0.01)\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        + (early if is_early else "    threading.Thread(target=poke, daemon=True).start()\n")
        + "    try:\n"
        "        list(run_on_segments(hang, RealDisk(), [1, 2, 3], jobs=2, total_bytes=1, few_bytes=0))\n"
        "    except KeyboardInterrupt:\n"
        "        print('interrupted')\n"
    )
    module = "def hang(disk, task):\n    import threading\n    threading.Event().wait()\n"
    script = storage / "hanging.py"
    script.write_text(module + program)
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, "interrupted\n")
    assert "Traceback" not in ended.stderr


def test_progress_is_for_terminals_only(storage: Path) -> None:
    arguments = [sys.executable, "-m", "waltzctl", "verify-segments", str(storage)]
    piped = subprocess.run(arguments, capture_output=True, check=True)
    assert piped.stderr == b""
    assert b"\x1b" not in piped.stdout
    parent, child = os.openpty()
    subprocess.run(arguments, stdout=subprocess.DEVNULL, stderr=child, check=True)
    os.close(child)
    assert b"verify: " in os.read(parent, 4096)
    os.close(parent)


@pytest.mark.parametrize(("no_color", "coloured"), [("", True), ("1", False)])
def test_colour_is_for_terminals_that_want_it(storage: Path, no_color: str, coloured: bool) -> None:
    environment = {**os.environ, "TERM": "xterm", "NO_COLOR": no_color}
    environment.pop("FORCE_COLOR", None)
    parent, child = os.openpty()
    arguments = [sys.executable, "-m", "waltzctl", "verify-segments", str(storage)]
    subprocess.run(arguments, stdout=child, stderr=subprocess.DEVNULL, check=True, env=environment)
    os.close(child)
    shown = os.read(parent, 1 << 16)
    os.close(parent)
    assert (b"\x1b[1;32m" in shown) == coloured


def test_the_installed_command(storage: Path) -> None:
    command = shutil.which("waltzctl", path=str(Path(sys.executable).parent))
    if command is None:
        pytest.skip("the package is not installed beside this interpreter")
    ended = subprocess.run([command, "verify-segments", str(storage)], capture_output=True, text=True, check=False)
    assert ended.returncode == 0
    assert ended.stdout.startswith("clean\n")


def test_grpc_is_told_to_be_quiet_and_to_let_programs_start_before_it_is_loaded() -> None:
    """It looks at these once. Without them it writes onto the terminal, and of programs that are started with a fork while
    calls run, as PySpark starts Java, one in seven ends at once."""
    code = (
        "import os, sys\n"
        "from waltzctl import main\n"
        "sys.argv = ['waltzctl', '--version']\n"
        "try:\n"
        "    main.main()\n"
        "except SystemExit:\n"
        "    print(os.environ['GRPC_VERBOSITY'], os.environ['GRPC_ENABLE_FORK_SUPPORT'], 'grpc' in sys.modules)\n"
    )
    bare = {name: value for name, value in os.environ.items() if not name.startswith("GRPC_")}
    done = subprocess.run([sys.executable, "-c", code], env=bare, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "NONE 0 False"


@pytest.mark.parametrize("form", [["-o", "json"], ["-ojson"], ["--output", "json"], ["--output=json"]])
def test_an_error_is_an_object_for_who_asked_for_json(waltzctl: Tool, tmp_path: Path, form: list[str]) -> None:
    plain = waltzctl("verify-segments", tmp_path / "nowhere")
    told = waltzctl("verify-segments", tmp_path / "nowhere", *form)
    assert (told.code, told.out) == (plain.code, "")
    error = json.loads(told.err)["error"]
    assert error["exit_code"] == told.code
    assert plain.err.startswith(f"{error['code']} {error['message']}")
    assert error["next_step"] in " ".join(plain.err.split())

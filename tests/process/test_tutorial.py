"""The tutorial does what it says: its files are written and its commands are typed, in their order, in one shell."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

from tests.process.versions import environment
from tests.release.packages import project_version
from waltzctl.local_cluster.local import LocalCluster
from waltzctl.shell import blueprint
from waltzd.errors.operations import NoLocalCluster

PAGE = Path(__file__).parents[2] / "docs" / "tutorial.md"
WAIT = 'until (exec 3<>/dev/tcp/127.0.0.1/{port}) 2>/dev/null; do kill -0 "$service"; sleep 0.1; done'
"""What a person does by waiting for three seconds."""


LOOK = """\
import json, sys
what, name = sys.argv[1:]
if what == "port":
    print(json.load(open("theatre/cluster.json"))["ports"][name][0])
else:
    print(json.load(open("theatre/state.json"))["daemons"][name]["pid"])
"""
"""What a person reads in the table of `up`."""


def steps() -> list[tuple[str, str]]:
    """The blocks of the page with their languages."""
    return re.findall(r"^```(\w+)\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def typed(block: str, ports: dict[str, int], programs: Path) -> str:
    """A block of commands, with the programs in this folder and with free ports."""
    script = block.replace(".venv/bin", str(programs))
    script = script.replace(" --port 25000", "")
    for name, number in {"25000": "port server-1", "25002": "port server-2", "PID_1": "pid server-1"}.items():
        script = script.replace(name, f"$(theatre {number})")
    for said, port in ports.items():
        script = script.replace(said, str(port))
    script = script.replace("service:app &", "service:app & service=$!")
    waits = "\n".join(WAIT.format(port=port) for port in ports.values() if f"--port {port}" in script)
    return script.replace("sleep 3", waits)


def followed(script: str, folder: Path) -> tuple[int, str, str]:
    """What a shell says to it. Whatever it leaves behind is ended."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("WALTZ_")}
    with (folder / "said").open("w+") as said, (folder / "complained").open("w+") as complained:
        shell = subprocess.Popen(
            ["bash", "-e", "-c", script], cwd=folder, env=variables, stdout=said, stderr=complained, start_new_session=True
        )
        try:
            shell.wait(timeout=300)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGKILL)
            shell.wait()
            with contextlib.suppress(NoLocalCluster):  # the last command removed it
                LocalCluster.find(folder / "theatre").kill()
    return shell.returncode, (folder / "said").read_text(), (folder / "complained").read_text()


def test_the_tutorial_can_be_followed(tmp_path: Path) -> None:
    programs = environment("HEAD", project_version()).parent  # of the built wheel, as the page says
    somewhere = random.randrange(len(blueprint.candidate_ports()))
    ports = dict(zip(("8001", "8002", "8003"), blueprint.free_ports(somewhere), strict=False))
    (tmp_path / "theatre.py").write_text(LOOK)
    script = [f'theatre() {{ "{sys.executable}" theatre.py "$@"; }}']
    for language, block in steps():
        if language == "python":
            name = block.partition("\n")[0].removeprefix("# ")
            assert re.fullmatch(r"\w+\.py", name), "the first line says what the file is called"
            (tmp_path / name).write_text(block, encoding="utf-8")
        elif "pip install" not in block:
            script.append(f'echo "== $SECONDS s"\n{typed(block, ports, programs)}')
    code, said, complained = followed("\n".join([*script, "wait"]), tmp_path)
    assert (code, "Traceback" in complained) == (0, False), f"{said}\n{complained}"
    expected = [
        "Committed(id=0",
        "b'the doors are open'",
        "1 passed",
        '{"sold":"Ada"}{"detail":"the seat is sold"}{"sold":"Ben"}',
        '{"sold":"Eve"}',
        "HEALTHY",
        '{"12":"Ada","13":"Ben","14":"Eve"}',
    ]
    at = 0
    for words in expected:
        at = said.find(words, at)
        assert at >= 0, f"{words} is missing in:\n{said}\n{complained}"

"""Commands that the README and two pages for operators show do what is said there, with other ports and directories."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from itertools import islice
from pathlib import Path

from waltzctl.shell import blueprint

ROOT = Path(__file__).parents[2]


PAGES = ("README.md", "docs/offline-tools.md", "docs/storage.md")


def blocks(page: str) -> list[str]:
    """Return the blocks of a page that are typed in a checkout."""
    found = re.findall(r"^```sh\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    return [block for block in found if ".venv/bin/" in block or "./dev" in block]


def test_the_commands_that_pages_show_in_a_checkout_run(tmp_path: Path) -> None:
    somewhere = random.randrange(len(blueprint.candidate_ports()))
    listen, admin = islice(blueprint.free_ports(somewhere), 2)  # and no outgoing connection is given one of them
    tried = 0
    for block in [block for page in PAGES for block in blocks(page)]:
        if "./dev" in block:
            continue
        tried += 1
        script = block.replace(".local", str(tmp_path / "local")).replace(".venv/bin", str(Path(sys.executable).parent))
        script = script.replace(
            "sleep 3", f'until (exec 3<>/dev/tcp/127.0.0.1/{admin}) 2>/dev/null; do kill -0 "$storage"; sleep 0.1; done'
        )
        script = script.replace("55281", str(admin))
        ports = f"listen: 127.0.0.1:{listen}\nadmin_listen: 127.0.0.1:{admin}\n"
        script = script.replace("\nYAML\n", f"\n{ports}YAML\n")
        done = subprocess.run(
            ["bash", "-e", "-c", f"{script}\nwait"], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
        )
        assert (done.returncode, "Traceback" in done.stderr) == (0, False), f"{script}\n{done.stdout}\n{done.stderr}"
        if "waltzd storage" in block:
            assert "waltzd storage is ready" in done.stdout
            assert "everything that was acknowledged is on the disk" in done.stderr
        if "waltzctl up" in block:
            assert "4 partitions open, on 2 servers and 3 storages" in done.stdout
            assert ("Committed(id=0" if "BlockingClient" in block else "committed: partition 0, id 0") in done.stdout
        if "waltzctl reset" in block:
            assert "6 processes stopped" in done.stdout
            assert not (tmp_path / "local" / "cluster").exists()
    assert tried == 4


def test_the_demonstration_holds(tmp_path: Path) -> None:
    """The first command of the README."""
    command = [sys.executable, "-m", "tests.demo", str(tmp_path / "demo")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert re.search(r"^right: the counter is \d+, its lowest value was \d+$", done.stdout, re.M)
    assert "views agree: True" in done.stdout
    assert re.search(r"^right: \d+ accounts add up to 0, ", done.stdout, re.M)
    assert "1 finding" in done.stdout


def test_the_readme_begins_with_its_two_commands() -> None:
    assert [block.strip() for block in blocks("README.md")[:2]] == ["./dev demo", "./dev test"]

"""The plan keeps its rules on every seed; a short run ends soundly, and leaves nothing behind, however it ends."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path

import pytest

from tests.chaos import run, sandbox
from tests.chaos.__main__ import main
from tests.chaos.damage import flip
from tests.chaos.nemesis import NEMESES
from tests.chaos.plan import STORAGES, STORAGES_AT_ONCE, Kind, Part, Round, Strike, draw, goes_with
from tests.chaos.processes import password
from tests.chaos.switch import HEALTHY, Trouble, fate, spell, understand

KINDS = [made.kind for made in NEMESES.values() if made.is_fair]
RUN_SECONDS = 240
SHORT = "kill-server,kill-storages,pause-server,cut,disk-full,power-cut,flip-segment"


def rounds(seed: int, count: int = 60) -> list[Round]:
    return list(islice(draw(KINDS, seed), count))


# -- the plan


def test_no_round_takes_more_than_a_minority_of_good_copies() -> None:
    for found in (found for seed in range(200) for found in rounds(seed)):
        damaged = [strike.target for strike in found.strikes if strike.kind.is_damaging]
        assert len(damaged) <= 1
        assert set(damaged) <= set(STORAGES)
        assert found.is_healed or not damaged
        touched = [thing for strike in found.strikes for thing in strike.touches]
        assert len(touched) == len(set(touched)), f"{found}: one undoes what the other does"


def test_what_touches_all_storages_goes_with_none_of_them() -> None:
    all_of_them = Strike(Kind(name="power", targets=(STORAGES_AT_ONCE,)), STORAGES_AT_ONCE)
    one = Strike(Kind(name="kill", targets=STORAGES), "storage-2")
    link = Strike(Kind(name="cut", targets=STORAGES, part=Part.LINK), "storage-2")
    assert not goes_with(one, [all_of_them])
    assert not goes_with(all_of_them, [link, one])
    assert goes_with(link, [all_of_them])


def test_two_storages_are_not_damaged_at_once() -> None:
    kind = Kind(name="wipe", targets=STORAGES, is_damaging=True)
    assert not goes_with(Strike(kind, "storage-1"), [Strike(kind, "storage-2")])


def test_a_seed_decides_everything() -> None:
    assert rounds(7) == rounds(7)
    assert rounds(7) != rounds(8)


def test_everything_has_its_turn_and_a_quarter_of_the_rounds_is_quiet() -> None:
    found = rounds(3, 400)
    assert {strike.kind.name for each in found for strike in each.strikes} == {kind.name for kind in KINDS}
    quiet = sum(not each.strikes for each in found)
    assert 70 <= quiet <= 130


# -- the parts


def test_what_becomes_of_a_packet() -> None:
    pick = random.Random(1)
    cut = {(1, 2): Trouble(source=1, destination=2, loss=1.0)}
    assert fate(cut, 1, 2, pick) == ()
    assert fate(cut, 2, 1, pick) == HEALTHY, "one direction only"
    late = {(1, 2): Trouble(source=1, destination=2, delay_seconds=0.1, jitter_seconds=0.05)}
    assert all(0.1 <= fate(late, 1, 2, pick)[0] <= 0.15 for _ in range(100))
    lossy = {(1, 2): Trouble(source=1, destination=2, loss=0.3, doubled=0.5)}
    counts = [len(fate(lossy, 1, 2, pick)) for _ in range(1000)]
    assert 200 < counts.count(0) < 400
    assert 250 < counts.count(2) < 450


def test_troubles_travel_as_one_line() -> None:
    troubles = [Trouble(source=1, destination=2, loss=0.5), Trouble(source=2, destination=1, delay_seconds=0.1)]
    line = spell(troubles)
    assert line.endswith("\n")
    assert line.count("\n") == 1
    assert list(understand(line).values()) == troubles


def test_a_password_is_what_javas_random_says() -> None:
    """`new Random(42).nextInt()` is -1170105035."""
    assert password(42 ^ 0xB3415C00)[:4] == (-1170105035).to_bytes(4, "little", signed=True)


def test_a_flipped_bit_flips_back(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(100))
    at = flip(path, 0.5, 3)
    assert path.read_bytes() == bytes(50) + b"\x08" + bytes(49)
    assert flip(path, 0.5, 3) == at
    assert path.read_bytes() == bytes(100)


# -- whole runs


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "tests.chaos", *arguments]


def environment(folder: Path, **more: str) -> dict[str, str]:
    return {**os.environ, "TMPDIR": str(folder), **more}


def left_in(folder: Path) -> list[str]:
    """Files, mounts and processes that mention the folder."""
    found = [str(path) for path in folder.iterdir()]
    found += [line for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines() if str(folder) in line]
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes()
        except (FileNotFoundError, ProcessLookupError):  # it has just ended
            continue
        if os.fsencode(folder) in words:
            found.append(words.decode(errors="replace"))
    return found


def test_a_short_run_is_sound_and_leaves_nothing(tmp_path: Path) -> None:
    """Its first round has two strikes, however few rounds it comes to."""
    arguments = command("--minutes", "0.1", "--seed", "4", "--rate", "200", "--only", SHORT)
    done = subprocess.run(
        arguments, env=environment(tmp_path), capture_output=True, text=True, check=False, timeout=RUN_SECONDS
    )
    print(done.stdout, done.stderr)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("SOUND\n")
    struck = re.search(r"seed 4: \d+ rounds, (\d+) strikes, (\d+) transactions", done.stdout)
    assert struck is not None
    assert int(struck[1]) >= 2
    assert int(struck[2]) >= 100
    skipped = {line.split()[1].rstrip(":") for line in done.stdout.splitlines() if line.startswith("skipped ")}
    assert skipped == {name for name in SHORT.split(",") if NEMESES[name].refusal() is not None}
    assert left_in(tmp_path) == []


@pytest.mark.long  # in short: the run without rights that is interrupted below
def test_kills_need_no_rights_at_all(tmp_path: Path) -> None:
    done = subprocess.run(
        command("--kills", "2", "--seed", "1", "--rate", "200"),
        env=environment(tmp_path, **{sandbox.BARE: "yes"}),
        capture_output=True,
        text=True,
        check=False,
        timeout=RUN_SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert left_in(tmp_path) == []


POWER_CUT_AFTER_FULL = """
import os, sys
from pathlib import Path
from tests.chaos.disks import Disk

folder = Path(sys.argv[1])
disk = Disk(folder / "image", folder / "disk")
disk.make()
disk.fill()
os.sync()
disk.free()
disk.cut_power()
disk.restore_power()
print(sorted(path.name for path in (folder / "disk").iterdir()))
disk.unmount()
"""


def test_space_that_was_freed_stays_free_after_a_power_cut(tmp_path: Path) -> None:
    if (why := NEMESES["disk-full"].refusal()) is not None:
        pytest.skip(why)
    arguments = [*sandbox.ENTER, sys.executable, "-c", POWER_CUT_AFTER_FULL, str(tmp_path)]
    done = subprocess.run(arguments, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout == "['lost+found']\n", done.stderr


def test_a_run_notices_that_a_cluster_broke_its_promises(tmp_path: Path) -> None:
    if (why := NEMESES["lying-disks"].refusal()) is not None:
        pytest.skip(why)
    done = subprocess.run(
        command("--minutes", "0.05", "--seed", "1", "--rate", "200", "--only", "lying-disks", "--patience", "5"),
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        check=False,
        timeout=RUN_SECONDS,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "WRONG: " in done.stdout
    assert done.stdout.splitlines()[-1].startswith("kept: ")
    kept = list(tmp_path.glob("*/cluster-1/history/*.jsonl"))
    assert kept, "a history to look at"
    shutil.rmtree(next(tmp_path.iterdir()))
    assert left_in(tmp_path) == []


@pytest.mark.parametrize("bare", ["", "yes"])
def test_a_run_that_is_interrupted_leaves_nothing(tmp_path: Path, bare: str) -> None:
    process = subprocess.Popen(
        command("--seed", "1"), env=environment(tmp_path, **{sandbox.BARE: bare}), stdout=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + RUN_SECONDS
    while not list(tmp_path.glob("*/cluster-1/cluster/log/storage-3.log")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=RUN_SECONDS)
    assert process.returncode == 130, output
    assert left_in(tmp_path) == []


def test_what_is_not_possible_is_skipped_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NEMESES["cut"], "refusal", lambda: "there is no network")
    assert run.skipped(["cut", "kill-server"]) == ["skipped cut: there is no network"]
    assert list(run.available(["cut", "kill-server"])) == ["kill-server"]


@pytest.mark.parametrize("arguments", [("--only", "nonsense"), ("--minutes", "0"), ("--kills", "-1")])
def test_arguments_that_make_no_sense(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["chaos", *arguments])
    with pytest.raises(SystemExit) as refused:
        main()
    assert refused.value.code == 2
    assert capsys.readouterr().out == ""

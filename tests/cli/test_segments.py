"""`verify-segments`, `rebuild-index` and `segment dump` as an operator meets them.

Whole outputs are kept in `golden/`; `REWRITE=1` writes them anew, and the difference is what to review.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from waltzd.format.layout import HARD_STATE_BYTES, ControlHeader, HardState, Identity

Tool = Callable[..., Any]
GOLDEN = Path(__file__).parent / "golden"
KEY = "1d07c30d-8ad3-4978-9a0b-63b5a017e338"


def plain(text: str, storage: Path) -> str:
    text = text.replace(str(storage), "/storage")
    text = re.sub(r"in \d+\.\d s \([\d.]+ MB/s\)", "in N s (N MB/s)", text)
    text = re.sub(r'"(seconds|megabytes_per_second)": [\d.]+', r'"\1": 0', text)
    return re.sub(r"[ \t]+$", "", text, flags=re.M)


def check_golden(name: str, text: str) -> None:
    path = GOLDEN / name
    if os.environ.get("REWRITE"):
        path.write_text(text)
    assert text == path.read_text()


def flip(path: Path, at: int, bits: int = 1) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= bits
    path.write_bytes(content)


def contents(storage: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(storage.rglob("*")) if path.is_file()}


@pytest.fixture
def held(storage: Path) -> Iterator[Path]:
    """A second process holds the storage, as a daemon does."""
    program = (
        "import sys; from waltzd.disk.real import RealDisk\n"
        "file = RealDisk().open(sys.argv[1], write=True); file.lock(); print('held', flush=True); sys.stdin.read()"
    )
    arguments = [sys.executable, "-c", program, str(storage / "waltz-storage.ctl")]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield storage
        process.stdin.close()


# -- whole outputs -----------------------------------------------------------------------------------------------------

SEGMENT = "1/0000000000000000000.seg"
SHOWN: list[tuple[str, str, int]] = [
    ("verify-clean.txt", "verify-segments {original}", 0),
    ("verify.txt", "verify-segments {storage}", 8),
    ("verify.json", "verify-segments -o json {storage}", 8),
    ("rebuild.txt", "rebuild-index {storage}", 5),
    ("rebuild.json", "rebuild-index -o json {storage}", 5),
    ("rebuild-left-out.txt", "rebuild-index {storage}/0 --leave-out 5-5", 0),
    ("dump.txt", "segment dump --through 3 {storage}/" + SEGMENT, 0),
    ("dump.json", "segment dump -o json --payload-bytes 8 --through 3 {storage}/" + SEGMENT, 0),
    ("dump.hex", "segment dump -o hex --payload-bytes 20 --through 2 {storage}/" + SEGMENT, 0),
    ("dump-tail.hex", "segment dump -o hex --after 418 {storage}/0/0000000000000000332.seg", 0),
    ("dump-index.txt", "segment dump {storage}/1/0000000000000000030.idx", 0),
    ("dump-index.hex", "segment dump -o hex {storage}/1/0000000000000000030.idx", 0),
    ("dump-control.txt", "segment dump {storage}/waltz-storage.ctl", 0),
    ("dump-control.json", "segment dump -o json {storage}/waltz-storage.ctl", 0),
]


@pytest.mark.parametrize(("name", "command", "code"), SHOWN, ids=[shown[0] for shown in SHOWN])
def test_golden(waltzctl: Tool, original: Path, damaged: Path, name: str, command: str, code: int) -> None:
    places = {"storage": damaged, "original": original / "storage0"}
    told = waltzctl(*[word.format(**places) for word in command.split()])
    assert told.code == code
    assert ("Traceback" in told.err) is False
    check_golden(name, plain(told.out, damaged))


def test_tables_fit_in_80_columns(waltzctl: Tool, damaged: Path) -> None:
    for words in (
        ["verify-segments", "{}"],
        ["segment", "dump", "{}/" + SEGMENT],
        ["segment", "dump", "-o", "hex", "{}/" + SEGMENT],
    ):
        told = waltzctl(*[word.format(damaged) for word in words])
        wide = [line for line in told.out.splitlines() if len(line) > 80 and str(damaged) not in line]
        # The mark of a bad byte may stand behind the columns, and so may the summary, which is one line to search for.
        assert [line for line in wide if "bad byte" not in line and "MB/s" not in line] == []


# -- verify ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["storage0", "storage1", "storage2"])
def test_the_original_is_clean_and_stays_as_it_is(waltzctl: Tool, original: Path, name: str) -> None:
    before = contents(original / name)
    for arguments in ([], ["--deep"], ["--read-only"], ["--key", KEY], ["--jobs", "2"]):
        told = waltzctl("verify-segments", *arguments, "-o", "json", original / name)
        assert told.code == 0, told.out
        assert json.loads(told.out)["result"] == "clean"
    assert contents(original / name) == before


def test_a_directory_of_ours_is_clean_and_its_promises_count(waltzctl: Tool, storage: Path) -> None:
    control = ControlHeader.decode((storage / "waltz-storage.ctl").read_bytes(), "")
    (storage / "waltz-storage.id").write_bytes(Identity(control=control, directory=UUID(int=4)).encode())
    told = waltzctl("verify-segments", storage)
    assert told.code == 8
    assert told.out.count("damaged-promise-file") == 6
    for number, last in enumerate((419, 51, 74, -1, 42, 14)):
        hard_state = HardState(
            key=control.key, partition=number, incarnation=UUID(int=5), session=2, committed=last, durable=last,
            newest=0, segments=1,
            is_clean=False, sequence=0,
        )  # fmt: skip
        (storage / str(number) / "promise").write_bytes(hard_state.encode().ljust(HARD_STATE_BYTES, b"\0"))
    assert waltzctl("verify-segments", storage).code == 0
    for suffix in ("seg", "idx"):
        (storage / f"5/0000000000000000011.{suffix}").unlink()
    told = waltzctl("verify-segments", storage / "5")
    assert told.code == 8
    assert "the promised committed mark is 14" in " ".join(told.out.split())
    assert waltzctl("segment", "dump", storage / "5/promise").out.count("committed 14") == 1
    assert waltzctl("segment", "dump", storage / "waltz-storage.id").code == 0


def test_a_held_directory(waltzctl: Tool, held: Path) -> None:
    told = waltzctl("verify-segments", held)
    assert (told.code, told.out) == (1, "")
    assert told.err.startswith("W3001 ")
    assert "--read-only" in told.err
    for path in (held / "0", held / "0/0000000000000000000.seg"):
        assert waltzctl("verify-segments", path).code == 1
    told = waltzctl("verify-segments", "--read-only", held)
    assert told.code == 0
    assert "was not judged" in told.out


def test_the_end_of_a_held_log_is_not_judged(waltzctl: Tool, held: Path) -> None:
    with (held / "0/0000000000000000332.seg").open("ab") as file:
        file.write(bytes(30))
    with (held / "0/0000000000000000332.idx").open("ab") as file:
        file.write(bytes(8))
    told = waltzctl("verify-segments", "--read-only", "-o", "json", held)
    assert told.code == 0
    assert json.loads(told.out)["summary"]["in_flight_bytes"] == 30
    flip(held / "0/0000000000000000332.seg", 200)
    assert waltzctl("verify-segments", "--read-only", held).code == 8


def test_a_held_directory_is_not_rebuilt(waltzctl: Tool, held: Path) -> None:
    before = contents(held)
    told = waltzctl("rebuild-index", held / "0")
    assert (told.code, told.out) == (4, "")
    assert contents(held) == before


# -- what may be given as a path ---------------------------------------------------------------------------------------

FIRST = "0000000000000000000"
BOTH = pytest.mark.parametrize("command", ["verify-segments", "rebuild-index"])


@BOTH
@pytest.mark.parametrize("path", ["{}", "{}/", "{}/./3/..", "{}/3", "{}/3/" + FIRST + ".seg", "{}/3/" + FIRST + ".idx"])
def test_any_part_of_a_storage(waltzctl: Tool, storage: Path, command: str, path: str) -> None:
    assert waltzctl(command, path.format(storage)).code == 0


@BOTH
def test_the_same_thing_twice_counts_once(
    waltzctl: Tool, storage: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(storage / "1")
    told = waltzctl(command, "-o", "json", ".", storage / "1", "../1/0000000000000000013.seg", "../1/")
    assert json.loads(told.out)["summary"]["segments"] == 8
    told = waltzctl(command, "-o", "json", storage / "1", storage, storage / "0")
    assert json.loads(told.out)["summary"]["segments"] == 18


@BOTH
def test_paths_that_make_no_sense(waltzctl: Tool, storage: Path, tmp_path: Path, command: str) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    other = tmp_path / "other"
    other.mkdir()
    (other / "notes.txt").write_text("hello")
    link = tmp_path / "link"
    link.symlink_to(storage)
    seg_link = tmp_path / "0000000000000000000.seg"
    seg_link.symlink_to(storage / "0/0000000000000000000.seg")
    fifo = tmp_path / "0000000000000000001.seg"
    os.mkfifo(fifo)
    expected = {
        tmp_path / "missing": (2, "W1003"),
        storage / "0/0000000000000000000.seg/x": (2, "W1003"),
        empty: (1, "W1004"),
        other: (1, "W1004"),
        other / "notes.txt": (2, "W1001"),
        storage / "waltz-storage.ctl": (2, "W1001"),
        link: (2, "W1006"),
        seg_link: (2, "W1006"),
        fifo: (2, "W1006"),
        Path("/dev/null"): (2, "W1006"),
    }
    for path, (code, number) in expected.items():
        told = waltzctl(command, path)
        assert (told.code, told.out, told.err[:5]) == (code, "", number), path
        assert "Not done:" in told.err
        assert waltzctl(command, storage, path).code == code, "one bad path stops the command before it starts"


@pytest.mark.parametrize("kind", ["symlink", "fifo", "directory"])
def test_something_else_inside_a_storage(waltzctl: Tool, storage: Path, kind: str) -> None:
    path = storage / "2/0000000000000000000.seg"
    moved = storage / "moved"
    path.rename(moved)
    if kind == "symlink":
        path.symlink_to(moved)
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.mkdir()
    told = waltzctl("verify-segments", storage / "2")
    assert told.code == 8
    assert "not-a-file" in told.out
    assert waltzctl("rebuild-index", storage / "2").code == 5


def test_a_partition_that_is_a_link(waltzctl: Tool, storage: Path) -> None:
    (storage / "2").rename(storage.parent / "elsewhere")
    (storage / "2").symlink_to(storage.parent / "elsewhere")
    told = waltzctl("verify-segments", storage)
    assert told.code == 8
    assert "it is a link or a file" in told.out


def test_files_of_another_cluster_and_of_the_future(waltzctl: Tool, storage: Path) -> None:
    assert waltzctl("verify-segments", "--key", str(UUID(int=1)), storage).code == 8
    flip(storage / "3/0000000000000000000.seg", 3, 2)
    flip(storage / "2/0000000000000000000.seg", 20)
    found = json.loads(waltzctl("verify-segments", "-o", "json", storage).out)["findings"]
    assert [(finding["partition"], finding["code"]) for finding in found] == [
        (2, "foreign-cluster-key"),
        (3, "unknown-version"),
    ]
    assert waltzctl("rebuild-index", storage).code == 5


@pytest.mark.skipif(os.geteuid() != 0, reason="gives up the rights of root for a moment")
@pytest.mark.parametrize("place", ["", "0", "0/0000000000000000000.seg", "waltz-storage.ctl"])
def test_no_permission(waltzctl: Tool, storage: Path, tmp_path: Path, place: str) -> None:
    for command in (["verify-segments"], ["rebuild-index"], ["segment", "dump"]):
        waltzctl(*command, storage / "0/0000000000000000000.seg")  # everything that is imported late is imported now
    path = tmp_path
    while path != path.parent and path.stat().st_mode & 0o5 != 0o5:
        path.chmod(0o755)
        path = path.parent
    for inside in [storage, *storage.rglob("*")]:
        inside.chmod(0o777)
    (storage / place).chmod(0)
    os.seteuid(65534)
    try:
        verified, rebuilt = waltzctl("verify-segments", storage), waltzctl("rebuild-index", storage)
    finally:
        os.seteuid(0)
    assert (verified.code, verified.out, verified.err[:5]) == (1, "", "W1005")
    assert (rebuilt.code, rebuilt.err[:5]) == (1, "W1005")


# -- rebuild -----------------------------------------------------------------------------------------------------------


def test_rebuild_repairs_what_verify_finds(waltzctl: Tool, storage: Path) -> None:
    before = {name: content for name, content in contents(storage).items() if name.endswith(".seg")}
    (storage / "0/0000000000000000190.idx").unlink()
    flip(storage / "1/0000000000000000000.idx", 150)
    (storage / "4/0000000000000000000.idx").write_bytes(b"")
    assert waltzctl("verify-segments", storage).code == 8
    told = waltzctl("rebuild-index", "-o", "json", storage)
    assert told.code == 0
    summary = json.loads(told.out)["summary"]
    assert (summary["rebuilt"], summary["right"], summary["segments"]) == (3, 15, 18)
    assert waltzctl("verify-segments", storage).code == 0
    assert {name: content for name, content in contents(storage).items() if name.endswith(".seg")} == before


def test_rebuild_without_a_control_file(waltzctl: Tool, storage: Path) -> None:
    alone = storage.parent / "alone"
    shutil.copytree(storage / "1", alone)
    (alone / "0000000000000000013.idx").unlink()
    assert waltzctl("rebuild-index", alone).code == 0
    assert waltzctl("verify-segments", alone).code == 0
    assert waltzctl("rebuild-index", "--key", str(UUID(int=1)), alone).code == 5


@pytest.mark.parametrize("text", ["5", "5-", "-5", "7-5", "a-b", "5-6-7", "--1"])
def test_ranges_that_make_no_sense(waltzctl: Tool, storage: Path, text: str) -> None:
    told = waltzctl("rebuild-index", storage / "0", f"--leave-out={text}")
    assert (told.code, told.err[:5]) == (2, "W1001")


def test_left_out_ids_belong_to_one_partition(waltzctl: Tool, storage: Path) -> None:
    assert waltzctl("rebuild-index", storage, "--leave-out", "5-5").code == 2
    assert waltzctl("rebuild-index", storage / "0", storage / "1", "--leave-out", "5-5").code == 2


# -- dump --------------------------------------------------------------------------------------------------------------


def test_the_dump_in_csv_has_a_row_for_each_entry(waltzctl: Tool, original: Path, damaged: Path) -> None:
    def rows(path: Path) -> list[dict[str, str]]:
        return list(csv.DictReader(io.StringIO(waltzctl("segment", "dump", "-o", "csv", path).out)))

    sound = original / "storage0/0/0000000000000000000.seg"
    told = [json.loads(line) for line in waltzctl("segment", "dump", "-o", "json", sound).out.splitlines()[1:]]
    assert [(row["kind"], int(row["id"]), row["crc"]) for row in rows(sound)] == [
        (one["kind"], one["id"], one["crc"]) for one in told
    ]
    assert "damage" in {row["kind"] for row in rows(damaged / "0/0000000000000000000.seg")}
    assert {row["kind"] for row in rows(damaged / "1/0000000000000000000.idx")} == {"index-entry"}
    assert {row["kind"] for row in rows(original / "storage0/waltz-storage.ctl")} == {"slot"}


def test_the_dump_in_json_is_the_manifest(waltzctl: Tool, original: Path) -> None:
    section = (original / "manifest.txt").read_text().split("## storage0\n")[1].split("\n## ")[0]
    expected = [line for line in section.splitlines() if line.startswith("rec ")]
    made: list[str] = []
    for path in sorted((original / "storage0").glob("*/*.seg")):
        lines = [json.loads(line) for line in waltzctl("segment", "dump", "-o", "json", path).out.splitlines()]
        assert (lines[0]["version"], lines[0]["kind"], lines[0]["key"]) == (1, "segment", KEY)
        for r in lines[1:]:
            digest = hashlib.sha256(base64.b64decode(r["payload_base64"])).hexdigest()
            assert r["payload_is_whole"]
            made.append(
                f"rec {path.parent.name} {r['id']} {r['client']}:{r['generation']}:{r['partition']}:{r['sequence']} "
                f"{r['header']} {r['length']} {digest} {r['data_crc']} {r['crc']} off={r['offset']} seg={path.name}"
            )
    assert made == expected


def test_the_bad_byte_is_marked_even_in_a_payload_that_is_not_shown(waltzctl: Tool, storage: Path) -> None:
    path = storage / "1/0000000000000000000.seg"
    flip(path, 3000)
    value = path.read_bytes()[3000]
    told = waltzctl("segment", "dump", "-o", "hex", "--payload-bytes", "0", "--after", "0", "--through", "1", path)
    [marked] = [line for line in told.out.splitlines() if "bad byte" in line]
    assert f">{value:02x}<" in marked
    offset = int(marked.split()[0])
    assert offset <= 3000 < offset + 16


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs a terminal")
def test_the_bad_byte_is_reversed_on_a_terminal(damaged: Path) -> None:
    parent, child = os.openpty()
    arguments = [
        "segment",
        "dump",
        "-o",
        "hex",
        "--after",
        "4",
        "--through",
        "5",
        str(damaged / "0/0000000000000000000.seg"),
    ]
    subprocess.run([sys.executable, "-m", "waltzctl", *arguments], stdout=child, check=True)
    os.close(child)
    assert b">\x1b[7m01\x1b[0m<" in os.read(parent, 1 << 16)
    os.close(parent)


def test_dump_of_what_is_no_file_of_ours(waltzctl: Tool, storage: Path) -> None:
    (storage / "notes.txt").write_text("hello")
    assert waltzctl("segment", "dump", storage / "notes.txt").code == 2
    assert waltzctl("segment", "dump", storage).code == 2
    assert waltzctl("segment", "dump", storage / "missing.seg").code == 2
    assert waltzctl("segment", "dump", "/dev/null").code == 2
    assert waltzctl("segment", "dump", "--after", "4", "--through", "4", storage / "0/0000000000000000000.seg").code == 2


def test_dump_of_an_empty_file(waltzctl: Tool, storage: Path) -> None:
    for name in ("0000000000000000000.seg", "0000000000000000000.idx", "waltz-storage.ctl", "promise"):
        (storage.parent / name).write_bytes(b"")
        for output in ("table", "json", "csv", "hex"):
            assert waltzctl("segment", "dump", "-o", output, storage.parent / name).code == 0

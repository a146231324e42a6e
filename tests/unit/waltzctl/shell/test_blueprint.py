"""Files that a command writes whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from waltzctl.shell.blueprint import write_whole
from waltzd.errors import WaltzError


def test_a_directory_is_no_place_for_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The root has no name, which was a ValueError; beside any other directory a file was left."""
    monkeypatch.chdir(tmp_path)
    there = tmp_path / "there"
    there.mkdir()
    for path in (there, Path("/"), Path(), Path("..")):
        with pytest.raises(WaltzError, match=f"writing {path}"):
            write_whole(path, b"x")
    assert [*tmp_path.iterdir()] == [there]
    write_whole(there / "file", b"x")
    assert (there / "file").read_bytes() == b"x"

"""What is said of a process that ends before it is ready."""

from __future__ import annotations

from pathlib import Path

import pytest

from waltzctl.local_cluster.daemon import Daemon
from waltzd.errors.operations import DaemonEnded


def test_a_process_that_is_just_ending_has_its_exit_code_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a moment it has no words any more, and cannot be waited for yet."""
    daemon = Daemon("one", [], tmp_path / "one.log", is_ready=lambda _: False)
    daemon.command = ["/bin/sh", "-c", "sleep 0.3; exit 7"]
    daemon.spawn()
    monkeypatch.setattr(daemon, "_is_ours", lambda _: False)
    with pytest.raises(DaemonEnded, match="one ended with exit code 7"):
        daemon.is_ready()

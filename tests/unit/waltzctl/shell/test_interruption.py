"""A command that is told to end, once or again and again, ends in order."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

_COMMAND = """
import select, sys, time
from waltzctl.shell.interruption import ignore_signals, ending_in_order

def wait_for_a_line():  # in small steps: a signal that comes just before a read would not end it
    while not select.select([sys.stdin], [], [], 0.05)[0]:
        pass
    sys.stdin.readline()

heard = []
try:
    with ending_in_order(heard.append if sys.argv[1] == "hears" else None) as ending:
        try:
            print("ready", flush=True)
            while True:
                time.sleep(0.05)
        finally:
            print("clearing up", flush=True)
            wait_for_a_line()
            print("cleared", heard, flush=True)
except KeyboardInterrupt:
    if sys.argv[1] == "hears":
        print("behind it", flush=True)
        wait_for_a_line()
    ignore_signals()
    print("told", ending.was_signalled, flush=True)
    wait_for_a_line()
    sys.exit(130)
"""


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_once_more_disturbs_nothing_that_is_being_cleared_up(first: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _COMMAND, "hears"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(first)
        assert process.stdout.readline() == "clearing up\n"
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        process.stdin.write("\n")
        process.stdin.flush()
        cleared = process.stdout.readline()
        assert cleared.startswith("cleared [True, False")
        assert process.stdout.readline() == "behind it\n"
        process.send_signal(signal.SIGINT)
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "told True\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate("\n", timeout=30)
        assert (process.returncode, err) == (130, "")


def test_where_nobody_hears_each_of_them_is_ctrl_c() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _COMMAND, "deaf"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "clearing up\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "told True\n"
        process.communicate("\n", timeout=30)
        assert process.returncode == 130

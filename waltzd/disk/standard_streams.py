"""Standard input, output and error of a program. It is started without some of them where its caller has closed them."""

from __future__ import annotations

import os
import sys


def open_standard_streams() -> None:
    """Open what is closed among descriptors 0 to 2, before any other file.

    The next files that are opened would get these numbers, and a library that writes to standard error, or the interpreter
    at a fatal error, would write into a segment or a control file."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:  # it is closed, and so the lowest number that is free
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115  # for the life of the process
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115

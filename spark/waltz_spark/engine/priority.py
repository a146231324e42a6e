"""Behind everything else: what Spark does on this machine gets the processor when nobody else wants it.

An export reads and packs as fast as it is let, on every core; whoever runs one on the machine of a storage does not want
appends to wait for that. Linux has a class for such work. It belongs to a thread, and what that thread starts has it, too:
so Java is started by a thread of its own, and so are, by Java, the workers. What they write is behind as well, as far as
the disk's scheduler knows classes. But the class counts only among the processes of one session: many a Linux shares the
processor between sessions first, each a group of its own. So Java begins a session, and gives it the least share. Nothing
is lost where the machine has nothing else to do.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

_LOWEST = 19
_SCRIPT = f"""#!/bin/sh
# Made by Waltz for one run: the session that this Java is in gets the least share of the processor.
{{{{ echo {_LOWEST} >/proc/self/autogroup; }}}} 2>/dev/null
exec '{{java}}' "$@"
"""
IN_A_SESSION: dict[str, Any] = {"start_new_session": True}
"""How to start the process that becomes this Java."""


def java_behind(home: str, folder: Path) -> str:
    """A JAVA_HOME with the same Java, whose whole session has the least share. `folder`: for it, and for this run alone.
    Many a machine lets nobody run what lies among temporary files: there, it is the Java itself."""
    program = folder / "java" / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(_SCRIPT.format(java=f"{home}/bin/java".replace("'", "'\\''")))
    program.chmod(0o755)
    return str(folder / "java") if os.access(program, os.X_OK) else home


def behind_others(start: Callable[[], object]) -> None:
    """Call it so that what it starts has the processor only when nobody else wants it."""
    failures: list[BaseException] = []

    def work() -> None:
        try:
            _step_back()
            start()
        except BaseException as error:  # noqa: BLE001  # it belongs to whoever asked
            failures.append(error)

    thread = threading.Thread(target=work, name="waltz spark start")
    thread.start()
    try:
        thread.join()
    except BaseException:  # told to end: what has just been started must be known to whoever ends it
        thread.join()
        raise
    if failures:
        raise failures[0]


def _step_back() -> None:
    """On Linux both are of the calling thread alone; elsewhere of the process, and so are not touched."""
    if hasattr(os, "SCHED_IDLE"):
        with suppress(OSError):  # a sandbox may forbid it: an export is as right in front of others
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST)

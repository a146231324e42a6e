"""One function over many segments, in processes where that pays.

A worker needs half a second to start, so little work is done here. Workers are fresh processes, because a fork would
inherit the lock of the directory. They end with their parent, however it ends; an interrupt reaches the parent alone, which
ends them.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait
from typing import TypeVar

from waltzd.disk.seam import Disk
from waltzd.errors import WorkerLost

FEW_BYTES = 1 << 30
"""Half a second of checking; below it the workers would not have started before it is done."""

Task = TypeVar("Task")
Result = TypeVar("Result")


def processors() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0))


def run(
    function: Callable[[Disk, Task], Result],
    disk: Disk,
    tasks: Sequence[Task],
    *,
    jobs: int,
    total_bytes: int,
    few_bytes: int = FEW_BYTES,
) -> Iterator[tuple[Task, Result]]:
    """Each task with its result, as they finish."""
    assert jobs > 0
    jobs = min(jobs, len(tasks))
    if jobs <= 1 or total_bytes < few_bytes:
        for task in tasks:
            yield task, function(disk, task)
        return
    others = set(multiprocessing.active_children())
    context = multiprocessing.get_context("spawn")
    executor = ProcessPoolExecutor(jobs, mp_context=context, initializer=_end_with_parent)
    futures: dict[Future[Result], Task] = {}
    is_done = False
    try:
        with _interrupts_wait():
            for task in tasks:
                futures[executor.submit(function, disk, task)] = task
        for future in as_completed(futures):
            yield futures.pop(future), future.result()
        is_done = True
    except BrokenProcessPool as error:
        raise WorkerLost("a worker process ended before its work was done") from error
    finally:
        if not is_done:  # an interrupt may come in the middle of the first hand-over, too
            executor.shutdown(wait=False, cancel_futures=True)
            for child in set(multiprocessing.active_children()) - others:
                child.terminate()
        executor.shutdown()


@contextlib.contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Workers inherit the blocked signal: Ctrl-C is for the parent, and a half-started worker prints no traceback."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_with_parent() -> None:
    """A worker that outlives a killed parent would go on writing beside the next holder of the directory."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()

"""Applies one function to many segments, in worker processes if there is enough work.

A worker needs half a second to start, so small amounts of work run in this process. Workers are spawned, because a fork
would inherit the lock of the directory. They exit when their parent exits for any reason. An interrupt reaches only the
parent, which terminates them."""

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
from waltzd.errors.operations import WorkerLost

FEW_BYTES = 1 << 30
"""Bytes below which no workers are started: they are checked in half a second, before a worker would be ready."""

Task = TypeVar("Task")
Result = TypeVar("Result")


def processors() -> int:
    """Return the number of processors that this process may use."""
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
    """Yield each task with its result, in the order in which they finish."""
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
        if not is_done:  # also if an interrupt came while tasks were submitted
            executor.shutdown(wait=False, cancel_futures=True)
            for child in set(multiprocessing.active_children()) - others:
                child.terminate()
        executor.shutdown()


@contextlib.contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Block SIGINT, which workers inherit: Ctrl-C is for the parent, and a starting worker prints no traceback."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_with_parent() -> None:
    """Exit when the parent exits: else a worker of a killed parent could write while another process holds the
    directory."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()

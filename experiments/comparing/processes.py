"""Runs in processes of their own, forked from one that has imported everything: a start takes no seconds.

The server of `multiprocessing` imports and never computes, so its children may use threads and accelerators.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pkgutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess, parent_process
from pathlib import Path
from types import FrameType
from typing import Any

from experiments.training.usage import UsageError, short
from experiments.training.writing import write_whole

STOPPED = 128
"""An exit status above this says: stopped by the signal status - 128, and can be gone on with."""


def server(modules: list[str]) -> multiprocessing.context.ForkServerContext:
    """Where processes are started from; `modules` are imported there once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(modules)
    # A terminal's Ctrl-C is not for the server, also while it imports: it begins with what stands here.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, before)
    return context


def run(
    context: multiprocessing.context.ForkServerContext,
    function: str,
    log: Path,
    failure: Path,
    args: tuple[Any, ...],
    tick: Callable[[], None] = lambda: None,
) -> int:
    """Call a function in a process of its own and wait for it.

    A signal that comes meanwhile is passed on once, and a second one ends the process.

    Args:
        context: see `server`.
        function: "module:name"; gives an exit status or None.
        log: where what it prints is added.
        failure: where the reason is written if it raises, or is killed.
        args: its arguments.
        tick: called about four times a second.

    Returns:
        Its exit status, 1 after a failure; 128 + n where this process got signal n, whatever became of the other.
    """
    failure.unlink(missing_ok=True)
    process = context.Process(target=_attempt, args=(function, log, failure, args))
    with _signals(process) as got:
        process.start()
        if got:  # while the server was importing
            process.terminate()
        while process.is_alive():
            process.join(0.25)
            tick()
    if got:
        return STOPPED + got[0]
    assert process.exitcode is not None
    if process.exitcode < 0:
        text = f"killed by {signal.Signals(-process.exitcode).name}, perhaps for want of memory; see {log}"
        write_whole(failure, text.encode())
        return 1
    return process.exitcode


def _attempt(function: str, log: Path, failure: Path, args: tuple[Any, ...]) -> None:
    # A terminal's Ctrl-C is for the parent, which passes it on once; a second signal would end a run at once.
    os.setpgid(0, 0)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with log.open("a", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        status = pkgutil.resolve_name(function)(*args) or 0
    except (UsageError, ValueError, OSError) as error:
        write_whole(failure, short(str(error)).encode())
        status = 1
    except Exception as error:
        traceback.print_exc()
        write_whole(failure, short(f"{type(error).__name__}: {error}; see {log}").encode())
        status = 1
    raise SystemExit(status)


@contextlib.contextmanager
def _signals(process: BaseProcess) -> Iterator[list[int]]:
    got: list[int] = []

    def on_signal(number: int, frame: FrameType | None) -> None:
        got.append(number)
        if process.pid is None:
            print("stops as soon as what it needs is imported", file=sys.stderr, flush=True)
        else:
            (process.terminate if len(got) == 1 else process.kill)()

    handlers = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield got
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)

"""A life of the command in which the n-th call of a kind fails: I/O in a folder, or allocation."""

from __future__ import annotations

import contextlib
import errno
import io
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from streamkern.cli import main

LARGE = 1 << 13
"""Bytes of an allocation that counts; rows here are few."""


class Fault:
    """Counts the calls of `kind` and makes number `n` of them fail, that one alone."""

    def __init__(self, kind: str, n: int, folder: str) -> None:
        self.kind, self.n, self.folder = kind, n, folder
        self.calls = 0
        self.lock = threading.Lock()

    def count(self) -> bool:
        with self.lock:
            self.calls += 1
            return self.calls == self.n

    def install(self) -> None:
        if self.kind == "memory":
            for name in ("empty", "zeros", "ones", "concatenate", "ascontiguousarray"):
                setattr(np, name, self.allocating(getattr(np, name)))
            return
        # Operations of Python on a path, and then on an open file.
        sys.addaudithook(self.audit)
        for name in ("write", "fsync", "pread"):
            setattr(os, name, self.failing(getattr(os, name)))

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.listdir"):
            return
        path = arguments[0]
        path = os.fsdecode(path) if isinstance(path, str | bytes | os.PathLike) else ""
        if path.startswith(self.folder) and self.count():
            raise self.error(path)

    def failing(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if self.count():
                raise self.error(None)
            return real(*arguments, **options)

        return call

    def allocating(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            made = real(*arguments, **options)
            if getattr(made, "nbytes", 0) >= LARGE and self.count():
                raise MemoryError(f"{made.nbytes} bytes could not be allocated")
            return made

        return call

    def error(self, path: str | None) -> OSError:
        code = errno.EIO if self.n % 2 else errno.ENOSPC
        return OSError(code, os.strerror(code), path)


def _run_command_child(
    arguments: Sequence[str], kind: str, n: int, folder: str, answer: Any
) -> None:
    fault = Fault(kind, n, folder)
    out, err = io.StringIO(), io.StringIO()
    fault.install()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main.run_command(arguments)
    answer.send((code, out.getvalue(), err.getvalue(), fault.calls))
    answer.close()
    os._exit(0)  # without waiting for threads that wait for the failed call


def run_with_fault(
    command_line: Sequence[object], folder: Path, kind: str = "io", n: int = 0
) -> tuple[int, str, str, int]:
    """Run the command, and return its exit code, stdout, stderr and number of calls of that kind. n
    : number of the call that fails; 0 for none."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.nth_failure", "streamkern.cli.runs", "scipy.linalg"])
    receiver, sender = context.Pipe(duplex=False)
    arguments = ([str(word) for word in command_line], kind, n, str(folder), sender)
    process = context.Process(target=_run_command_child, args=arguments)
    process.start()
    sender.close()
    with receiver:
        assert receiver.poll(120), "it hangs"
        answer: tuple[int, str, str, int] = receiver.recv()
    process.join()
    return answer

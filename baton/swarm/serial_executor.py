"""Runs functions in the background, one after another, in a thread that ends whenever the queue is empty.

The thread must end, because a thread that has computed with torch keeps OpenMP's worker threads until it ends. If there
are more OpenMP threads than cores, OpenMP lets waiting threads sleep instead of spin, which doubles the time of a train
step of a small model.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from threading import Lock, Thread
from typing import Any

from baton.clock import run_into


class SerialExecutor:
    """A queue of functions to run. Thread-safe."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = Lock()
        self._waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._thread: Thread | None = None
        self._is_closed = False

    def submit(self, action: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Submit a function and return its future. The function runs after all functions that were submitted earlier.
        After `close`, the function is not run and the future is cancelled."""
        future: Future[Any] = Future()
        with self._lock:
            if self._is_closed:
                future.cancel()
                return future
            self._waiting.append((future, partial(action, *arguments)))
            if self._thread is None:
                self._thread = Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
        return future

    def close(self, timeout_s: float = 10.0) -> None:
        """Cancel all functions that have not started, and wait for the running one. May be called twice."""
        with self._lock:
            self._is_closed = True
            for future, _ in self._waiting:
                future.cancel()
            self._waiting.clear()
            thread = self._thread
        if thread is not None:
            thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._thread = None
                    return
                future, call = self._waiting.popleft()
            run_into(future, call)

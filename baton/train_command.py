"""What `baton train` does before the terminal: runs a loop, here or on a cluster; stops when asked; reports."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

out = Console()
err = Console(stderr=True)


def run_training(
    load: Callable[[Sequence[str]], Any],
    where: tuple[Path, str] | None,
    *,
    resume: bool,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Have a loop run before the terminal, here or by a plan on a Ray cluster, and report on it."""
    from baton.progress import TerminalObserver
    from baton.report import print_report, summarise

    stop, recipe = _StopRequest(), load(())
    console, steps = err if as_json else out, recipe.run.steps
    with TerminalObserver(console, steps) as observer, stop:
        if where is not None:
            from baton.fleet.ray_run import Order, train_on_ray

            loop = train_on_ray(Order(load, *where, resume, overwrite), observer, lambda: stop.is_requested)
        else:
            from baton.build import build_loop

            loop = build_loop(
                recipe, observer, resume=resume, overwrite=overwrite, should_stop=lambda: stop.is_requested
            )
            try:
                loop.train()
            finally:
                loop.close()
    report = summarise(loop.run)
    loop.run.write_report(msgspec.to_builtins(report))
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(report)).decode() + "\n")
    else:
        print_report(out, report)
    if loop.state.step < steps:
        console.print(
            f"stopped after step {loop.state.step} of {steps}; go on with the same command and --resume",
            highlight=False,
        )


class _StopRequest:
    """Ctrl-C once asks for a clean stop, twice leaves at once."""

    def __init__(self) -> None:
        self.is_requested = False
        self._before: Any = None

    def __enter__(self) -> _StopRequest:
        self._before = signal.signal(signal.SIGINT, self._on_interrupt)
        return self

    def __exit__(self, *exception: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _on_interrupt(self, *_: object) -> None:
        if self.is_requested:
            raise KeyboardInterrupt
        self.is_requested = True
        err.print("stopping after this step and its checkpoint; Ctrl-C again leaves at once")

"""Hidden commands of the child processes that `baton train` starts: engines and trainer ranks."""

from __future__ import annotations

from typing import Annotated

import typer

Descriptor = Annotated[int, typer.Argument(help="File descriptor of the socket to the parent.")]


def engine(descriptor: Descriptor) -> None:
    """Run as an engine of the parent process."""
    from baton.rollout.processes.engine_process import serve

    serve(descriptor)


def rank(descriptor: Descriptor) -> None:
    """Run as a trainer rank of the parent process."""
    from baton.trainer.parallel.rank_process import serve

    serve(descriptor)

"""The hidden commands that processes of ours are started by."""

from __future__ import annotations

from typing import Annotated

import typer


def engine(descriptor: Annotated[int, typer.Argument(help="File descriptor of the socket to the parent.")]) -> None:
    """Serve a parent process as its engine; started by `baton train`, not by people."""
    from baton.launch.engine_process import serve

    serve(descriptor)


def rank(descriptor: Annotated[int, typer.Argument(help="File descriptor of the socket to the parent.")]) -> None:
    """Serve a parent process as a rank of its trainer; started by `baton train`, not by people."""
    from baton.launch.rank_process import serve

    serve(descriptor)

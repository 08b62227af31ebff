"""The `baton` command: registers the subcommands, and reports an error as one sentence and an exit code.

Each subcommand is a function in a module of this folder. Such a function reads its options, calls a function that
returns a record, and prints the record. The function's body imports other modules, so that `baton --help` imports
neither torch nor the planner.
"""

from __future__ import annotations

import errno
import logging
import os
import sys
import traceback
from typing import Annotated, NoReturn

# The number of times that a waiting OpenMP thread spins before it sleeps. The variable must be set before torch is
# imported. Sleeping immediately (OMP_WAIT_POLICY=passive) doubles the time of a train step on two threads; longer
# spinning slows engine processes.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

import typer
from rich.text import Text

import baton
from baton.cli import hub, lists, measure, planning, runs, train, worker
from baton.cli.options import Commands
from baton.console import LogFormatter, err, out
from baton.errors import BatonError, UserError
from baton.files import STORAGE_ERRORS

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich would parse "[rollout]" as markup and remove it
    help="Reinforcement learning of language models on any hardware. To begin: baton train quickstart",
)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        out.print(baton.__version__)
        raise typer.Exit


app.command()(train.train)
app.command()(train.preview)
app.command()(train.sft)
app.command(name="eval")(measure.evaluate)
app.command()(runs.show)
app.command()(runs.report)
app.command()(runs.export)
app.command()(lists.keys)
app.command()(lists.tasks)
app.command()(lists.algorithms)
app.add_typer(measure.bench_app, name="bench")
app.command()(planning.plan)
app.command()(measure.profile)
app.command()(planning.simulate)
app.command()(runs.trace)
app.command()(worker.worker)
app.command()(hub.relay)
app.command()(hub.status)
app.add_typer(hub.token_app, name="token")
app.add_typer(planning.cluster_app, name="cluster")

Descriptor = Annotated[int, typer.Argument(help="File descriptor of the socket to the parent.")]


@app.command(hidden=True)
def engine(descriptor: Descriptor) -> None:
    """Run as an engine of the parent process."""
    from baton.rollout.processes.engine_process import serve

    serve(descriptor)


@app.command(hidden=True)
def rank(descriptor: Descriptor) -> None:
    """Run as a trainer rank of the parent process."""
    from baton.trainer.parallel.rank_process import serve

    serve(descriptor)


PATH_ERRORS = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR)
"""Error numbers of paths that the user must change. An OSError that is neither here nor in `STORAGE_ERRORS` shows a
traceback."""


def main() -> None:
    """Run the command line. The exit code is 2 for a UserError and for an error of `PATH_ERRORS`, and 1 for any other
    failure. The errors of Baton and of paths and storage are printed as one sentence on stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(LogFormatter())
    logging.getLogger("baton").addHandler(handler)
    # transformers imports torchao if it is installed; its warnings about kernels of GPUs concern no user of Baton
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        app(standalone_mode=True)
    except UserError as error:
        _fail("error", error, 2)
    except BatonError as error:
        _fail(type(error).__name__, error, 1)
    except Exception as error:  # noqa: BLE001  # printed through `err`, which escapes untrusted text in the message
        if isinstance(error, OSError) and error.errno in STORAGE_ERRORS:
            _fail("StorageFault", error, 1)
        if isinstance(error, OSError) and error.errno in PATH_ERRORS and error.filename is not None:
            _fail("error", f"{error.filename}: {error.strerror}", 2)
        err.print("".join(traceback.format_exception(error)), end="")
        sys.exit(1)


def _fail(name: str, error: Exception | str, code: int) -> NoReturn:
    err.print(Text.assemble((f"{name}:", "bold red"), f" {error}"))
    sys.exit(code)

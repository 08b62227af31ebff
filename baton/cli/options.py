"""Options and arguments that several commands share, and functions that print results."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperGroup

from baton.console import Console, out, print_json

Shown = TypeVar("Shown")

RecipePath = Annotated[
    Path, typer.Argument(help="Recipe TOML, or the name of a shipped recipe, such as quickstart or sokoban.")
]
RunPath = Annotated[Path, typer.Argument(help="A run's directory, such as runs/quickstart.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...", help="Keys of the recipe to override, such as trainer.lr=3e-6 run.seed=7."
    ),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Delete an existing run of this name with its output, and start again.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Html = Annotated[Path | None, typer.Option(help="Write an HTML page with charts to this file.")]
Calibration = Annotated[Path | None, typer.Option(help="Efficiencies by GPU type, written by `baton profile`.")]
ClusterFile = Annotated[Path | None, typer.Option("--cluster", help="Cluster TOML: machines, GPU types and links.")]
MODEL = typer.Option(help="Hugging Face model directory or its config.json; weights are not needed.")
WORKLOAD = typer.Option(help="Workload TOML, or a run's directory to measure the workload from.")

HubUrl = Annotated[str, typer.Argument(metavar="URL", help="URL of the hub, such as https://hub.example:7000.")]
TokenPath = Annotated[Path, typer.Option("--token-file", help="File with your token, written by `baton token create`.")]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="Allow plain HTTP to another machine; the token can be intercepted.")
]
Authority = Annotated[Path | None, typer.Option("--ca", help="PEM file of the CA that signed the hub's certificate.")]


RENAMED_OPTIONS = {
    "--patience": "--reconnect-timeout",
    "--best": "--sort best",
    "--worst": "--sort worst",
    "--longest": "--sort longest",
    "--skipped": "--from skipped",
}
"""Options of earlier versions, each with its current name."""


class Commands(TyperGroup):
    """A command group whose help shows the complete first sentence of each command, which click would truncate."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # typer bundles its own copy of click
        found = [(name, self.commands[name]) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl([(name, each.get_short_help_str(1000)) for name, each in found if not each.hidden])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in self.commands:  # the error message suggests commands, but no hidden ones
            self.commands = {name: each for name, each in self.commands.items() if not each.hidden}
        return super().resolve_command(ctx, args)

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        for old in (argument.partition("=")[0] for argument in args):
            if old in RENAMED_OPTIONS:
                ctx.fail(f"{old} is now called {RENAMED_OPTIONS[old]}")
        return super().parse_args(ctx, args)


def command_group(about: str) -> typer.Typer:
    """Return an empty group of commands. `about`: the group's help text."""
    group = typer.Typer(cls=Commands, no_args_is_help=True, help=about)
    group.callback()(lambda: None)  # without a callback, typer turns a group of one command into this command
    return group


def show(
    record: Shown, printer: Callable[[Console, Shown], None], *, as_json: bool, console: Console | None = None
) -> None:
    """Print a record as JSON, or as text with `printer`."""
    if as_json:
        print_json(record)
    else:
        printer(console or out, record)


def print_written(*paths: Path | None) -> None:
    """Print the paths of the files that a command wrote."""
    for path in paths:
        if path is not None:
            out.print(f"written: {path}")

"""What several commands have: a group's help, arguments and options declared once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

RecipePath = Annotated[Path, typer.Argument(help="TOML file; recipes/ holds some to begin with.", show_default=False)]
RunPath = Annotated[Path, typer.Argument(help="A run's directory, such as runs/quickstart.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Overrides, such as trainer.lr=3e-6 run.seed=7.", show_default=False),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for scripts instead of text for people.")]
Html = Annotated[Path | None, typer.Option(help="Write a page with pictures.", show_default=False)]


class Commands(TyperGroup):
    """A group whose help has the first sentence of each command whole; click cuts it to fit a line."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # typer has a click of its own
        found = [(name, self.commands[name]) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl([(name, each.get_short_help_str(1000)) for name, each in found if not each.hidden])

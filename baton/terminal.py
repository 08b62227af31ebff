"""Arguments and options that several commands have, declared once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RecipePath = Annotated[Path, typer.Argument(help="TOML file; recipes/ holds some to begin with.", show_default=False)]
RunPath = Annotated[Path, typer.Argument(help="A run's directory, such as runs/quickstart.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Overrides, such as trainer.lr=3e-6 run.seed=7.", show_default=False),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for scripts instead of text for people.")]
Html = Annotated[Path | None, typer.Option(help="Write a page with pictures.", show_default=False)]

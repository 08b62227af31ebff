"""What all commands share: where they print, and the options that many have."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console

out = Console()
err = Console(stderr=True)

RecipePath = Annotated[Path, typer.Argument(help="TOML file; recipes/ holds some to begin with.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Overrides, such as trainer.lr=3e-6 run.seed=7.", show_default=False),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for scripts instead of text for people.")]


def print_json(value: Any) -> None:
    """Print a value as JSON, for scripts."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value)).decode() + "\n")

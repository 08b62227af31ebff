"""Print the keys of recipes."""

from __future__ import annotations

from collections.abc import Sequence

from baton.console import Console
from baton.recipe.keys import LISTS, RecipeKey


def print_keys(console: Console, keys: Sequence[RecipeKey]) -> None:
    """Print keys by section."""
    section = None
    for key in keys:
        if key.section != section:
            section = key.section
            console.print(f"\n[{section}]" if section else "\ntop level", style="bold")
            if section in LISTS:
                console.print(
                    f"  a list: [[{section}]] may appear several times; overrides number the entries from 0, such as "
                    f"{section}.0.{key.key}=…"
                )
        default = "required" if key.default is None else f"= {key.default}"
        console.print(f"  {key.key} {default}   ({key.type})")
        console.print(f"      {key.meaning}", style="dim")

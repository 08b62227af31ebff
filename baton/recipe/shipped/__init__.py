"""The recipes and the model that are part of the package, for use from any directory.

In a checkout, `recipes` and `models` are links to the folders at its top level. A wheel contains copies of their files.
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parent


def shipped(path: str | Path) -> Path | None:
    """Return the shipped file or directory to which a relative path refers. Return None if no shipped file or directory
    has this name, or if `path` itself exists. For example, `recipes/quickstart.toml` and `quickstart` refer to a
    recipe, and `models/quickstart` refers to the model.
    """
    given = Path(path)
    if given.exists() or given.is_absolute() or ".." in given.parts:
        return None
    choices = (given, Path("recipes", f"{path}.toml"))
    return next((ROOT / each for each in choices if each.parts[1:] and (ROOT / each).exists()), None)


def find(path: str | Path) -> Path:
    """Return the shipped file or directory to which a path refers, or the path itself if there is none."""
    return shipped(path) or Path(path)


def shipped_recipes() -> list[str]:
    """Return the names of the shipped recipes."""
    return sorted(file.stem for file in (ROOT / "recipes").glob("*.toml"))

"""Read a recipe from a TOML file and dotted overrides, and report each mistake in one sentence."""

from __future__ import annotations

import logging
import tomllib
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from baton.errors import UserError, nearest
from baton.policy.settings import ModelSettings
from baton.recipe.changes import REMOVED, RENAMED
from baton.recipe.shipped import find, shipped, shipped_recipes

logger = logging.getLogger(__name__)
Kind = TypeVar("Kind", bound=BaseModel)
MAX_SHOWN = 200
"""Maximum length of a wrong value in an error message, in characters; a longer value is cut."""


def load_recipe(kind: type[Kind], path: Path, overrides: Sequence[str] | Mapping[str, Any] = ()) -> Kind:
    """Read a recipe of the given kind, and apply overrides: texts such as `a.b=c`, or keys with values. Raises
    UserError with a line per mistake.

    If `path` does not exist, it may be the name of a shipped recipe. Likewise, `model.path` may name a shipped model. A
    relative path in the file is relative to the file's directory if it exists there, otherwise to the current
    directory.
    """
    tree = read_tree(path)
    pairs = overrides.items() if isinstance(overrides, Mapping) else map(key_and_value, overrides)
    for key, value in pairs:
        set_key(tree, key, value)
    return parse_recipe(kind, tree, str(path))


def read_tree(path: Path) -> dict[str, Any]:
    """Return the sections of a recipe file, or of the shipped recipe with this name. Raises UserError."""
    path = find(path)
    if not path.is_file():
        near = get_close_matches(path.name, [p.name for p in path.parent.glob("*.toml")], n=1)
        hint = f"; did you mean {path.parent / near[0]}?" if near else f"; shipped are {', '.join(shipped_recipes())}"
        raise UserError(f"there is no recipe {path} (relative to {Path.cwd()}){hint}")
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # not TOML, not UTF-8, or a number with too many digits
        raise UserError(f"{path} is not valid TOML: {error}") from error
    if path.parent != Path():
        tree = _with_paths_beside(tree, path.parent)
    return tree


def parse_recipe(kind: type[Kind], tree: dict[str, Any], where: str) -> Kind:
    """Return the recipe with these sections. Raises UserError with a line per mistake, each beginning with `where`. If
    `model.path` is a run's directory, it is replaced by the path of the run's newest intact checkpoint."""
    try:
        recipe = kind.model_validate(tree)
    except ValidationError as error:
        if (confusion := _confusion(kind, tree)) is not None:
            raise UserError(f"{where} {confusion}") from error
        lines = [_sentence(kind, problem) for problem in error.errors()]
        raise UserError("\n".join(f"{where}: {line}" for line in lines)) from error
    model = getattr(recipe, "model", None)
    if not isinstance(model, ModelSettings):
        return recipe
    found = str(shipped(model.path) or model.path)
    if (Path(found) / "run.json").is_file():
        found = _checkpoint_of_run(Path(found))
    return recipe.model_copy(update={"model": model.model_copy(update={"path": found})})


PATHS = (
    *("model.path", "task.path", "eval.task.path", "data", "algorithm.reference", "reward.model"),
    *("fleet.cluster", "fleet.workload", "fleet.calibration"),
)
"""Keys whose values may be paths of files or directories to read."""
FUNCTIONS = (
    *("task.environment", "task.tools", "task.params.reward"),
    *("eval.task.environment", "eval.task.tools", "eval.task.params.reward", "reward.function"),
)
"""Keys whose values may have the form `file.py:name`. If a value is a list, its elements may have this form."""


def _with_paths_beside(part: Any, directory: Path, key: str = "") -> Any:
    """Return a part of a recipe in which each relative path that exists in `directory` begins with `directory`. Other
    paths stay relative to the current directory. `key`: dotted name of the part."""
    if isinstance(part, list):
        return [_with_paths_beside(each, directory, key) for each in part]
    if isinstance(part, dict):
        found = {
            name: _with_paths_beside(value, directory, f"{key}.{name}".removeprefix("."))
            for name, value in part.items()
        }
        if key == "reward" and part.get("kind") == "http" and "model" in part:
            found["model"] = part["model"]  # the name of a model on the server
        return found
    is_function = key in FUNCTIONS
    if not isinstance(part, str) or not (is_function or key in PATHS):
        return part
    file, colon, name = part.partition(":") if is_function else (part, "", "")
    is_file = not is_function or file.endswith(".py")
    is_found = is_file and not Path(file).is_absolute() and (directory / file).exists()
    return f"{directory / file}{colon}{name}" if is_found else part


def _checkpoint_of_run(run: Path) -> str:
    """Return the path of a run's newest intact checkpoint. Raises UserError if the run has no intact checkpoint."""
    from baton.trainer.checkpoint import newest_intact_checkpoint  # imported here because it imports torch

    found = newest_intact_checkpoint(run / "checkpoints", logger.warning)
    if found is None:
        raise UserError(
            f"model.path: the run {run} has no checkpoint; give the directory of a model, such as that of `baton sft`"
        )
    return str(found)


def key_and_value(override: str) -> tuple[str, Any]:
    """Return the key and the value of an override such as `a.b=c`. Raises UserError for a text of another form."""
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise UserError(f"override {override!r}: write section.key=value, such as trainer.lr=3e-6")
    try:
        value = tomllib.loads(f"v = {text}")["v"]
    except ValueError:
        value = text  # an unquoted word is a string; so is a number with too many digits for an int
    return key.strip(), value


def set_key(tree: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key such as `trainer.lr` or `reward.0.weight`. Raises UserError if a section does not exist."""
    *parents, last = key.split(".")
    if parents == ["algorithm"] and isinstance(tree.get("algorithm"), str):
        tree["algorithm"] = {"name": tree["algorithm"]}
    node: Any = tree
    try:
        for parent in parents:
            node = node[int(parent)] if isinstance(node, list) else node.setdefault(parent, {})
        if isinstance(node, list):
            node[int(last)] = value
        else:
            node[last] = value
    except (ValueError, IndexError, TypeError, AttributeError) as error:
        raise UserError(f"override {f'{key}={value}'!r}: the recipe has no section or list for {key!r}") from error


def _confusion(kind: type[BaseModel], tree: Mapping[str, Any]) -> str | None:
    """Return an error text if a recipe of a warm start is read as a training recipe, or vice versa; otherwise None."""
    if "checkpoint" in kind.model_fields and "output" in tree and ("data" in tree or "demonstrations" in tree):
        return "is a recipe for `baton sft`, but a recipe for `baton train` is needed"
    if "sft" in kind.model_fields and not tree.keys() & {"output", "data", "demonstrations", "scratch", "sft"}:
        return "is a recipe for `baton train`, but a recipe for `baton sft` is needed"
    return None


def _sentence(kind: type[BaseModel], problem: Any) -> str:
    where = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        if where in REMOVED:
            return f"{where} was removed: {REMOVED[where]}; remove the key"
        if where in RENAMED:
            return f"{where} is now called {RENAMED[where]}"
        known = sorted(_fields_at(kind, problem["loc"][:-1]))
        hint = nearest(str(problem["loc"][-1]), known, f"known are {', '.join(known)}")
        return f"unknown key {where}; {hint}"
    if problem["type"] == "missing":
        return f"{where} is missing"
    message = problem["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:] if problem["type"] != "value_error" else message
    got, shown = problem["input"], ""
    key, colon, rest = message.partition(": ")
    if where and colon and key in _fields_at(kind, problem["loc"]):  # the message begins with a key of the section
        return f"{where}.{key}: {rest}"
    if where and not isinstance(got, (dict, BaseModel)):
        shown = f": got {got!r}" if len(repr(got)) <= MAX_SHOWN else f": got {repr(got)[:MAX_SHOWN]}…"
    return f"{where}{shown}, {message}" if shown else f"{where}: {message}" if where else message


def _fields_at(kind: type[BaseModel], location: Sequence[int | str]) -> list[str]:
    """Return the known keys of the section at the location of a validation error."""
    for part in location:
        if isinstance(part, int):
            continue
        section = section_class(kind.model_fields[part]) if part in kind.model_fields else None
        if section is None:
            return []
        kind = section
    return list(kind.model_fields)


def section_class(field: FieldInfo) -> type[BaseModel] | None:
    """Return the class of a section, which may be optional or an element of a list; None for other keys."""
    candidates: list[Any] = [field.annotation, *get_args(field.annotation)]
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)

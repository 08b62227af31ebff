"""List all keys of recipes, from the settings classes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, get_args, get_origin

import msgspec
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from baton.errors import UserError, nearest
from baton.recipe.load import section_class
from baton.recipe.recipe import Recipe, WarmStart

LISTS = tuple(name for name, field in Recipe.model_fields.items() if get_origin(field.annotation) is tuple)
"""Names of the sections that may appear several times."""


class RecipeKey(msgspec.Struct, frozen=True):
    """A key that a recipe may have."""

    section: str
    """Dotted name of the section, such as `engine.vllm`; empty at the top level."""
    key: str
    type: str
    default: str | None
    """Python literal of the default; None if the key is required."""
    meaning: str


def recipe_keys(section: str | None = None) -> list[RecipeKey]:
    """Return the keys of one section, or of all sections; keys that only `baton sft` uses are last. Raises UserError
    for an unknown section."""
    found = list(dict.fromkeys([*_keys(Recipe), *_keys(WarmStart)]))
    if section is None:
        return found
    chosen = [key for key in found if key.section == section]
    if not chosen:
        sections = list(dict.fromkeys(key.section for key in found if key.section))
        hint = nearest(section, sections, f"there are {', '.join(sections)}")
        raise UserError(f"recipes have no section {section!r}; {hint}")
    return chosen


def _keys(kind: type[BaseModel]) -> Iterator[RecipeKey]:
    nested = {name: section_class(field) for name, field in kind.model_fields.items()}
    for name, field in kind.model_fields.items():
        if nested[name] is None:
            yield _key(name, field)
    for section, owner in nested.items():
        if owner is not None:
            for key in _keys(owner):
                yield msgspec.structs.replace(key, section=f"{section}.{key.section}" if key.section else section)


def _key(name: str, field: FieldInfo) -> RecipeKey:
    annotation = _without_constraints(field.annotation)
    shown = annotation.__name__ if isinstance(annotation, type) and not get_args(annotation) else str(annotation)
    default = None if field.is_required() else repr(field.get_default(call_default_factory=True))
    return RecipeKey("", name, shown.replace("typing.", ""), default, " ".join((field.description or "").split()))


def _without_constraints(annotation: Any) -> Any:
    """Return a type, and the types of a tuple's elements, without `Annotated`."""
    if get_origin(annotation) is tuple:
        return tuple[tuple(map(_without_constraints, get_args(annotation)))]  # type: ignore[misc]
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation

"""The base class of recipe sections. The modules that use a section declare it; `recipe/recipe.py` combines all."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """A section of a recipe, immutable. Unknown keys are refused; so are infinity and NaN, except in fields that allow
    them.

    The docstring of a field documents the key of that name.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True, protected_namespaces=()
    )

    def first_given(self, *keys: str) -> str | None:
        """Return the first of `keys` whose value differs from its default, or None if all have their default values.
        Values are compared, because the resolved recipe of a run states all keys."""
        fields = type(self).model_fields
        return next((k for k in keys if getattr(self, k) != fields[k].get_default(call_default_factory=True)), None)

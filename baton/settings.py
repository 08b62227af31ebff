"""The base class of recipe sections, which the modules that use them declare and `recipe/recipe.py` combines."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """A section of a recipe, immutable. Unknown keys are refused.

    The docstring of a field documents the key of that name.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=())

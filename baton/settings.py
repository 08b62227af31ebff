"""Base class of recipe sections. Each section is declared by its owner; `recipe/recipe.py` combines them."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """A frozen section of a recipe. Unknown keys are refused. The docstring of a field documents its key."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=())

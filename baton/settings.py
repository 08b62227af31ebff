"""The base of every recipe section: each owner declares its own, `recipe/load.py` puts them together."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """A frozen section of a recipe. Unknown keys are refused; a field's docstring is its documentation."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=())

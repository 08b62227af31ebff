"""Shipped recipes and presets resolve to the golden values: a key that moves or changes its default is seen."""

from __future__ import annotations

import tomllib

from tests.golden.recipes import HERE, resolved


def test_recipes_and_presets_resolve_to_the_golden_values() -> None:
    golden = {file.stem: tomllib.loads(file.read_text()) for file in HERE.glob("*.toml")}
    found = resolved()
    assert found.keys() == golden.keys()
    for name, tree in golden.items():
        assert found[name] == tree, name

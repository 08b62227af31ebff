"""Commands that do not play episodes refuse a multi-turn recipe before they start anything."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from baton.cli import main as cli
from baton.errors import UserError

RECIPE = """
[run]
name = "rooms"
[model]
path = "there/is/no/model"
[[task]]
name = "rooms"
environment = "sokoban"
"""


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (["bench", "rollout"], "`baton bench rollout` generates one-turn responses, without environments"),
        (["bench", "rollout", "--flat"], "`baton bench rollout` generates one-turn responses, without environments"),
        (["simulate", "--recipe"], "the simulator has no environments"),
    ],
)
def test_a_multi_turn_recipe_is_refused_in_one_sentence(tmp_path: Path, command: list[str], why: str) -> None:
    path = tmp_path / "rooms.toml"
    path.write_text(RECIPE)
    result = CliRunner().invoke(cli.app, [*command, str(path)])
    assert isinstance(result.exception, UserError)
    said = str(result.exception)
    assert said.startswith("task 'rooms' is multi-turn") or ": task 'rooms' is multi-turn" in said
    assert why in said
    assert "\n" not in said

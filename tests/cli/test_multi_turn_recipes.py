"""Multi-turn recipes: preview plays episodes, profile measures first turns, and other commands refuse them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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
        (["bench", "rollout"], "`baton bench rollout` generates single-turn responses, without environments"),
        (["bench", "rollout", "--flat"], "`baton bench rollout` generates single-turn responses, without environments"),
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


def on_the_shipped_recipe(command: list[str], small: Any) -> Any:
    changes = ["run.threads=1", "engine.processes=0", "engine.slots=8", "engine.dtype=float32", "model.device=cpu"]
    changes += ["rollout.batch_groups=2", "rollout.group_size=4", "engine.max_context_tokens=256"]
    words = [*command, "recipes/sokoban.toml", f"model.path={small.model}", *changes, "--json"]
    result = CliRunner().invoke(cli.app, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_preview_plays_episodes(small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = on_the_shipped_recipe(["preview", "-n", "2"], small)
    assert len(found["samples"]) == 8
    assert all(1 <= len(sample["turns"]) <= 5 for sample in found["samples"])
    assert all(turn["num_tokens"] <= 3 for sample in found["samples"] for turn in sample["turns"])
    assert found["findings"][0].startswith("before training: of 8 responses ")
    assert found["warnings"] == [line[9:] for line in found["findings"] if line.startswith("warning: ")]
    assert not list(tmp_path.iterdir())


def test_a_profile_measures_with_the_first_turns(small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = on_the_shipped_recipe(["profile", "--steps", "2", "--out", str(tmp_path / "calibration.toml")], small)
    assert {point["phase"] for point in found["points"]} == {"decode", "prefill", "train", "rollout"}
    (rollout,) = [point for point in found["points"] if point["phase"] == "rollout"]
    assert rollout["batch"] == 8
    assert 1 <= rollout["context"] <= 15
    assert all(point["seconds"] > 0 for point in found["points"])

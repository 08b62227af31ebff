"""`baton algorithms` and docs/algorithms.md say what the presets are."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from baton.cli.main import app
from baton.errors import UserError
from baton.recipe.presets import list_algorithms
from baton.trainer.algorithm import PRESETS, AlgorithmSettings

DOC = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()


def printed(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["algorithms", *arguments])
    assert done.exit_code == 0
    return done.stdout


def test_the_table_has_every_preset_with_its_paper() -> None:
    shown = printed()
    for name, preset in PRESETS.items():
        assert name in shown
        assert preset.paper in shown
    assert "rollout.dynamic_sampling" in shown


def test_json_holds_every_key_of_every_preset() -> None:
    found = json.loads(printed("--json"))
    assert [each["name"] for each in found] == list(PRESETS)
    for each in found:
        assert AlgorithmSettings(**{k: v for k, v in each["all"].items() if v is not None}) == AlgorithmSettings(
            name=each["name"]
        )
        assert each["sets"].items() <= each["all"].items()


def test_one_preset_is_shown_as_a_recipe_would_have_it() -> None:
    shown = printed("dapo")
    assert "clip_high = 0.28   # not the default" in shown
    assert "clip_low = 0.2\n" in shown
    assert "rollout.dynamic_sampling = true   # not the default" in shown
    assert 'aggregation = "token_mean"   # not the default' in shown
    with pytest.raises(UserError, match="there is no algorithm 'dpao'; did you mean 'dapo'"):
        list_algorithms("dpao")


def test_the_page_has_the_presets_as_they_are() -> None:
    for name, preset in PRESETS.items():
        row = re.findall(rf"^\| `{name}`.*", DOC, re.MULTILINE)[0]  # of the first table
        settings = AlgorithmSettings(name=name)
        assert preset.paper in row
        assert row.split("|")[-2].strip().startswith(f"{settings.num_updates}")
        if settings.objective == "clipped":
            assert f"{settings.clip_low} / {settings.clip_high}" in row


def test_the_page_has_every_choice() -> None:
    for key in ("objective", "advantage", "aggregation", "correction", "critic", "kl_in", "kl_estimator"):
        annotation = AlgorithmSettings.model_fields[key].annotation
        for choice in annotation.__args__:  # type: ignore[union-attr]
            assert choice in DOC, f"{key} = {choice}"

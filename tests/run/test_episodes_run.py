"""A real run of multi-turn episodes with a random tiny model: what it trains, writes and evaluates, and its resume."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import AutoTokenizer

import baton
from baton.errors import UserError
from baton.recipe.recipe import Recipe
from baton.recipe.workload import read_workload
from baton.records.metrics import read_metrics
from baton.records.run_directory import RunDirectory
from baton.run.dry_run import footprint
from baton.trainer.checkpoint import list_checkpoints
from baton.types import Author, EpisodeFinish, Segment
from tests.api_cases import CONFIG
from tests.run.stopping import StopWhen
from tests.run.test_loop import documented_names
from tests.run.test_resume import recipe, tiny_model, train
from tests.small_environment import Evenness, played

__all__ = ["tiny_model"]

pytestmark = pytest.mark.numerics


def episodes(model: Path, directory: Path, **changes: Any) -> Recipe:
    given = recipe(model, directory, **changes).model_dump()
    task = {
        "name": "evenness", "environment": "tests.small_environment:Evenness", "max_turns": 5, "max_turn_tokens": 4,
    }  # fmt: skip
    given["rollout"] |= {"max_new_tokens": 16}
    given["engine"] |= {"max_context_tokens": 128}
    given["environments"] |= {"processes": 1}
    function = {"kind": "function", "function": "tests.small_environment:played", "isolate": False, "weight": 0.5}
    return Recipe.model_validate({**given, "task": [task], "reward": [{"kind": "correct"}, function]})


@pytest.mark.parametrize("mode", ["sync", "partial"])
def test_a_run_of_multi_turn_episodes_trains_and_resumes(tiny_model: Path, tmp_path: Path, mode: str) -> None:
    whole = episodes(tiny_model, tmp_path / "whole", run__steps=4, rollout__mode=mode)
    train(whole, resume=False)
    run = RunDirectory.open(whole.run.path)
    for step in range(1, 5):
        for member in [member for group in run.groups(step) for member in group.members]:
            assert member.episode is not None
            assert 1 <= len(member.episode.exchanges) <= 3
            assert member.episode.finish_reason in (EpisodeFinish.ENVIRONMENT, EpisodeFinish.LENGTH)
            assert member.num_policy_tokens <= 16
            given = sum(exchange.reward for exchange in member.episode.exchanges)
            share = len(member.episode.exchanges) / 3
            assert member.judgement.parts == {"environment": pytest.approx(given), "played": pytest.approx(share)}
            assert member.judgement.reward == pytest.approx(given + 0.5 * share)
            inserted = [s for s in member.trajectory.segments if s.author is Author.ENVIRONMENT]
            assert len(inserted) == len({e.token_offset for e in member.episode.exchanges}) - (
                member.episode.finish_reason is EpisodeFinish.ENVIRONMENT
            )
            assert all(isinstance(s, Segment) for s in inserted)
    rows = [row for row in read_metrics(whole.run.path) if "reward/mean" in row]
    assert sum(row.get("env/turns", 0) for row in rows) > 0
    assert any(row["reward/std"] > 0 for row in rows)
    ended = [row for row in rows if "env/turns_mean" in row]  # in partial, a batch may be made of earlier episodes
    assert ended
    for row in ended:
        assert 1 <= row["env/turns_mean"] <= 3
        assert sum(value for name, value in row.items() if name.startswith("env/finish/")) == pytest.approx(1)
        assert 0 <= row["env/latency_mean"] <= row["env/latency_max"]
        assert 0 <= row["env/wait_frac"] <= 1
        named = {re.sub("(finish|failures|info)/.*", r"\1/<>", name) for name in row if name.startswith("env/")}
        assert named <= {re.sub("<.*>", "<>", name) for name in documented_names()}, "docs/metrics.md has each"
    assert {e.result.task for e in run.evaluations()} == {"evenness"}
    with pytest.raises(UserError, match="'evenness' is multi-turn, but a workload describes single-turn responses"):
        read_workload(whole.run.path)
    if mode != "sync":
        return
    first = episodes(tiny_model, tmp_path / "cut", run__steps=4)
    train(first, resume=False, stop=StopWhen(lambda: (first.run.path / "trajectories/step_000002.jsonl.gz").exists()))
    assert RunDirectory.open(first.run.path).recorded_steps()[-1] < 4
    train(first, resume=True)
    last = [load_file(list_checkpoints(r.run.path / "checkpoints")[-1] / "model.safetensors") for r in (whole, first)]
    assert all((last[0][name] == last[1][name]).all() for name in last[0]), "a resumed run has the same bits"


def test_a_class_and_a_function_from_python(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two train steps with an environment that is given as an object, and without data."""
    monkeypatch.chdir(tmp_path)
    changes = {"task.0.max_turn_tokens": 4, "rollout.max_new_tokens": 16, "engine.max_context_tokens": 128}
    config = CONFIG | changes | {"environments.processes": 1}
    first = baton.preview(tiny_model, None, played, n=1, environment=Evenness, config=config)
    assert [len(sample.turns) in (1, 2, 3) for sample in first] == [True] * 4
    run = baton.train(tiny_model, None, played, environment=Evenness, steps=2, name="r", config=config)
    assert [row["step"] for row in run.metrics()] == [0, 1, 2]
    assert run.recipe.task[0].environment == "tests.small_environment:Evenness"
    for sample in run.samples(2):
        assert sample.parts["played"] == pytest.approx(len([t for t in sample.turns if t.reward is not None]) / 3)
        assert sample.reward == pytest.approx(sample.parts["environment"] + sample.parts["played"])
    assert len(list(run.samples(2))) == 8


def test_a_template_without_turns_is_refused_before_the_run_has_a_directory(tiny_model: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_model, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    tokenizer.chat_template = "{{ messages[-1].content }}"
    tokenizer.save_pretrained(tmp_path / "model")
    wanted = episodes(tmp_path / "model", tmp_path / "runs")
    for begin in (lambda: train(wanted, resume=False), lambda: footprint(wanted)):
        with pytest.raises(UserError, match="cannot be used for multi-turn tasks"):
            begin()
    assert not (wanted.run.path / "run.json").exists()

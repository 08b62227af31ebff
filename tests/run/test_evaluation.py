"""Evaluation: intervals against numbers worked by hand, pass@k, and the same draws each time."""

from __future__ import annotations

import math
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.errors import UserError
from baton.policy.load import load_model
from baton.records.evaluation import Z_95, Evaluation, share_interval
from baton.rewards.scorer import RewardScorer
from baton.rewards.settings import RewardSettings
from baton.rollout.engine import EngineSettings
from baton.rollout.engines.fake import FakeEngine
from baton.rollout.eval_rollout import EvalRollout
from baton.rollout.transport import LocalTransport
from baton.rollout.worker_client import WorkerClient
from baton.run.assemble import evaluate_recipe, evaluated_model
from baton.run.evaluation import Evaluator
from baton.run.tokenization import PromptEncoder
from baton.tasks.stream import TaskMixture
from baton.types import Message, PolicyVersion, Prompt, SamplingParams


@pytest.mark.parametrize(
    ("right", "total", "low", "high"),
    [
        # Wilson: (p + z²/2n ± z √(p(1−p)/n + z²/4n²)) / (1 + z²/n), z² = 3.841459
        (5, 10, 0.236593, 0.763407),  # centre 0.5, half 1.959964 · √(0.025 + 0.00960365) / 1.3841459
        (0, 10, 0.0, 0.277533),  # high = z² / (n + z²) = 3.841459 / 13.841459
        (10, 10, 0.722467, 1.0),
        (81, 263, 0.255289, 0.366145),  # Newcombe 1998, example (a): 0.2553 to 0.3662
        (1, 29, 0.006113, 0.171755),  # Newcombe 1998, example (d): 0.0061 to 0.1718
    ],
)
def test_one_sample_per_prompt_has_wilsons_interval(right: int, total: int, low: float, high: float) -> None:
    found = share_interval([[i < right] for i in range(total)])
    assert found.value == right / total
    assert found.low == pytest.approx(low, abs=1e-4)
    assert found.high == pytest.approx(high, abs=1e-4)


def test_the_interval_covers_the_truth_nineteen_times_in_twenty() -> None:
    """1 000 surveys of 100 at p = 0.3: about 950 cover it, standard deviation 7."""
    dice = random.Random(1)
    found = [share_interval([[dice.random() < 0.3] for _ in range(100)]) for _ in range(1000)]
    assert 920 <= sum(i.low <= 0.3 <= i.high for i in found) <= 980


def test_samples_of_one_prompt_do_not_count_as_independent() -> None:
    """64 prompts whose 4 samples agree say as much as 64 single answers, not as 256."""
    rows = [[i % 2 == 0] * 4 for i in range(64)]
    clustered, single = share_interval(rows), share_interval([[row[0]] for row in rows])
    assert clustered.value == single.value == 0.5
    width = clustered.high - clustered.low
    assert width == pytest.approx(2 * Z_95 * math.sqrt(0.25 / 64), rel=0.1)  # 0.245
    assert share_interval(rows) == clustered, "the resampling is seeded"
    mixed = share_interval([[True, False] * 2] * 64)
    assert (mixed.low, mixed.high) == (0.5, 0.5), "prompts that all score alike leave no doubt between prompts"
    assert share_interval([[False] * 8] * 10).high == pytest.approx(0.277533, abs=1e-4), "no zero-width interval"
    assert share_interval([[True] * 8] * 10).low == pytest.approx(0.722467, abs=1e-4)


class Words:
    """A tokenizer for the fake engine: a prompt is its own number, a response the parity of its length."""

    def prompt_ids(self, messages: tuple[Message, ...]) -> tuple[int, ...]:
        return (int(messages[-1].content),)

    def text(self, token_ids: list[int], *, keep_special: bool = False) -> str:
        return f"<answer>{len(token_ids)}</answer>"


class Lengths:
    """A task that is solved by a response of the reference's length."""

    name = "lengths"
    scorer = "inline"
    columns = ()

    def score(self, answer: str | None, reference: str | None, metadata: object) -> float:
        return float(answer == reference)


def run(samples: int, temperature: float = 1.0, max_new_tokens: int = 9):
    """Prompt p, sample i gets p + i + 1 tokens; every reference is 3. `a` holds prompts 1 and 2, `b` holds 5."""
    prompts = [Prompt(str(p), task, (Message("user", str(p)),), "3") for p, task in ((1, "a"), (2, "a"), (5, "b"))]
    settings = EngineSettings(slots=8, max_context_tokens=64)
    numbers = (1, 2, 5)
    engine = FakeEngine(settings, PolicyVersion("e", 0), lambda group_id, sample: numbers[group_id] + sample + 1)
    judge = RewardScorer({"a": Lengths(), "b": Lengths()}, [RewardSettings(kind="correct")], {})  # type: ignore[dict-item]
    sampling = SamplingParams(max_new_tokens, temperature)
    encoder = PromptEncoder(Words())  # type: ignore[arg-type]
    rollout = EvalRollout(WorkerClient(LocalTransport(engine)))
    return Evaluator(prompts, encoder, judge, rollout, samples).evaluate(sampling, version=0)


def test_accuracy_and_pass_at_k_by_hand() -> None:
    """Lengths with two samples: prompt 1 gives 2, 3 (right once); prompt 2 gives 3, 4 (once); prompt 5 gives 6, 7."""
    results, groups = run(samples=2)
    a, b, overall = results
    assert [r.task for r in results] == ["a", "b", "all"]
    assert (a.accuracy.value, a.pass_at_k.value, a.mean_length_tokens) == (0.5, 1.0, 3.0)
    assert (b.accuracy.value, b.pass_at_k.value, b.mean_length_tokens) == (0.0, 0.0, 6.5)
    assert overall.accuracy.value == pytest.approx(1 / 3)
    assert overall.pass_at_k.value == pytest.approx(2 / 3)
    assert (overall.num_prompts, overall.samples) == (3, 2)
    assert [[m.judgement.is_correct for m in g.members] for g in groups] == [[False, True], [True, False], [False] * 2]


def test_one_sample_makes_pass_at_one_the_accuracy() -> None:
    for result in run(samples=1)[0]:
        assert result.pass_at_k == result.accuracy


def test_responses_that_were_cut_are_counted() -> None:
    results, _ = run(samples=2, max_new_tokens=4)
    assert [r.clip_ratio for r in results] == [0.0, 1.0, pytest.approx(2 / 6)]


def test_greedy_says_so() -> None:
    assert {r.way for r in run(samples=1, temperature=0)[0]} == {"greedy"}


def evaluated(path: Path, recipe: Path | None = None, temperature: float = 1.0, **options: Any) -> list[Evaluation]:
    """What `baton eval` finds for the run or the model at a path."""
    return evaluate_recipe(*evaluated_model(path, recipe), SamplingParams(0, temperature), **options)


def test_a_device_without_memory_for_the_model_gets_advice(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from baton.run import assemble

    def load(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    closed: list[TaskMixture] = []
    monkeypatch.setattr(assemble, "load_model", load)
    monkeypatch.setattr(TaskMixture, "close", lambda self: closed.append(self))
    with pytest.raises(UserError, match=r"the device is out of memory: CUDA out of memory.*; lower engine.slots"):
        evaluated(small.run, num_prompts=2)
    assert len(closed) == 1


def test_the_model_is_loaded_as_the_recipe_says(small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from baton.run import assemble

    recipe = tmp_path / "recipe.toml"
    recipe.write_text((small.run / "recipe.toml").read_text().replace('attention = "sdpa"', 'attention = "eager"'))
    loaded = []

    def load(*arguments: Any, **options: Any) -> Any:
        loaded.append(load_model(*arguments, **options))
        return loaded[-1]

    monkeypatch.setattr(assemble, "load_model", load)
    evaluated(small.run, recipe, num_prompts=1)
    assert [model.config._attn_implementation for model in loaded] == ["eager"]


def test_a_run_of_an_earlier_version_can_be_evaluated(small: Any, tmp_path: Path) -> None:
    """Its recipe has a key that was removed since."""
    shutil.copytree(small.run, tmp_path / "old")
    file = tmp_path / "old" / "recipe.toml"
    text = file.read_text()
    assert "[judge]" in text
    file.write_text(text.replace("[judge]", "[judge]\nload_timeout_s = 300.0"))
    assert [r.num_prompts for r in evaluated(tmp_path / "old", num_prompts=4)] == [2, 2, 4]


def test_two_evaluations_of_the_same_weights_are_the_same(small) -> None:
    first, second = (evaluated(small.run, samples=3, num_prompts=8) for _ in range(2))
    assert first == second
    assert first[-1].samples == 3
    other = evaluated(small.run, temperature=0.2, samples=3, num_prompts=8)
    assert other[-1].mean_length_tokens != first[-1].mean_length_tokens

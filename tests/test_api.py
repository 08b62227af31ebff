"""The public API: nine lines train a model; mistakes are refused before anything is written."""

from __future__ import annotations

import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import baton
from baton.errors import UserError
from baton.rewards.functions import PASSED
from baton.run.assemble import evaluate_recipe, evaluated_model
from baton.types import SamplingParams
from tests.api_cases import CONFIG, QUESTIONS
from tests.small_reward import evenness

pytestmark = pytest.mark.timing


@pytest.fixture(autouse=True)
def _in_its_own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def train(small: Any) -> Callable[..., baton.Run]:
    def call(reward: Any, data: Any = QUESTIONS, *, steps: int = 1, **arguments: Any) -> baton.Run:
        config = CONFIG | arguments.pop("config", {})
        return baton.train(small.model, data, reward, steps=steps, config=config, **({"name": "r"} | arguments))

    return call


class StopAfter:
    """Stops a run after a step, or sends this process a signal."""

    def __init__(self, step: int, number: int | None = None) -> None:
        self.step, self.number = step, number
        self.seen: list[tuple[int, str, Mapping[str, float]]] = []

    def on_step(self, run: baton.Run, step: int, metrics: Mapping[str, float]) -> bool:
        self.seen.append((step, run.status, metrics))
        if step == self.step and self.number is not None:
            os.kill(os.getpid(), self.number)
            return False
        return step == self.step


def test_a_run_has_its_recipe_metrics_samples_and_evaluations(train: Callable[..., baton.Run]) -> None:
    run = train(evenness, steps=2)
    assert (run.path, run.status) == (Path("runs/r"), "finished")
    assert run.recipe.run.steps == 2
    assert [row["step"] for row in run.metrics()] == [0, 1, 2]
    assert math.isfinite(run.metrics()[2]["policy/loss"])
    assert "eval/data/avg@1" in run.metrics()[2]
    samples = list(run.samples(2))
    assert len(samples) == 8
    for sample in samples:
        assert sample.parts == {"evenness": sample.reward}
    assert [(e.step, e.task, e.num_prompts) for e in run.evaluations()] == [(0, "data", 2), (2, "data", 2)]
    with pytest.raises(UserError, match="no trajectories of step 3; recorded: steps 1 to 2"):
        list(run.samples(3))


def test_arguments_bind_by_name_to_the_response_its_answer_and_the_columns(train: Callable[..., baton.Run]) -> None:
    calls: list[tuple[str, str, str | None, str, int]] = []

    def reward(answer: str, prompt: str, parsed: str | None, level: int, response: str, missing: float = 0.5) -> float:
        calls.append((prompt, response, parsed, answer, level))
        return missing

    train(reward, answer_format="last_line")
    rows = {row["prompt"]: row for row in QUESTIONS}
    assert calls
    for prompt, response, parsed, answer, level in calls:
        assert (answer, level) == (rows[prompt]["answer"], rows[prompt]["level"])
        lines = [line.strip() for line in response.splitlines() if line.strip()]
        assert parsed == (lines[-1] if lines else None)


def test_a_mapping_names_parts_and_none_is_no_reward(train: Callable[..., baton.Run]) -> None:
    def parts(response: str) -> dict[str, float | None]:
        return {"length": float(len(response)), "first": None if len(response) % 2 else 2.0}

    def only_even(response: str) -> float | None:
        return None if len(response) % 2 else 1.0

    for sample in train([parts, only_even], config={"reward.1.weight": 10}).samples(1):
        length = sample.parts["parts.length"]
        is_even = length % 2 == 0
        expected = {"parts.length": length} | ({"parts.first": 2.0, "only_even": 1.0} if is_even else {})
        assert sample.parts == expected
        assert sample.reward == length + (12 if is_even else 0)


def test_a_function_of_completions_is_called_once_per_group(train: Callable[..., baton.Run]) -> None:
    sizes = []

    async def ranks(completions: list[str], answer: list[str], **columns: list[Any]) -> list[float]:
        sizes.append((len(completions), len(set(answer)), set(columns["level"]) <= {0, 1}))
        return [float(len(c)) for c in completions]

    train(ranks, config={"eval.at_start": False})
    assert sizes[:2] == [(4, 1, True)] * 2  # two groups of the train step


@pytest.mark.parametrize(
    ("reward", "complaint"),
    [
        (lambda anwser: 1.0, "parameter 'anwser'.* provides only prompt, response, parsed.*did you mean 'answer'"),
        ("corect", "got 'corect', allowed is a function"),
        ([1], r"got 1 \(int\), allowed is a function"),
        (5, r"reward: got 5 \(int\), allowed is a function"),
        (None, r"reward: got None \(NoneType\), allowed is a function"),
        ("no_such_module:f", "cannot be imported: No module named 'no_such_module'"),
    ],
)
def test_a_wrong_reward_is_refused_before_a_run_exists(
    train: Callable[..., baton.Run], reward: Any, complaint: str
) -> None:
    with pytest.raises(UserError, match=complaint):
        train(reward)
    assert not Path("runs/r").exists()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"environment": StopAfter, "tools": [evenness]}, "environment, tools: give only one of them"),
        ({"tools": evenness}, r"tools: got <function .*, allowed is a list of functions"),
        ({"tools": [evenness], "reward": "correct"}, "with tools the reward is a function of the last turn's text"),
        ({"tools": [lambda city: city]}, "<lambda> cannot be imported by another process; define it at the top level"),
        ({"tools": [partial(evenness)]}, "functools:<object> cannot be imported by another process"),
        ({"environment": type("Local", (), {"__module__": "__main__"})}, "__main__:Local cannot be imported"),
    ],
)
def test_objects_that_no_other_process_can_import_are_refused(
    train: Callable[..., baton.Run], arguments: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(UserError, match=complaint):
        train(**{"reward": evenness} | arguments)
    assert not Path("runs/r").exists()


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        ([], "data has no rows"),
        (5, r"data: got 5 \(int\), allowed is a file or dataset by name, or a list of dicts"),
        ({"train": [], "test": []}, "row 1 is 'train' .*data\\['train'\\]"),
        ([{"text": "1+1"}], "has no 'prompt'; it has \\['text'\\]"),
        ([{"prompt": "1+1", "answer": object()}], "row 1 has a value that JSON cannot hold"),
        ("nowhere.jsonl", "there is no file 'nowhere.jsonl'"),
    ],
)
def test_wrong_data_is_refused_before_a_run_exists(train: Callable[..., baton.Run], data: Any, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        train(evenness, data)
    assert not Path("runs/r").exists()


def test_rows_without_a_reference_need_a_function(
    train: Callable[..., baton.Run], capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": row["prompt"]} for row in QUESTIONS]
    assert train(evenness, rows).status == "finished"
    with pytest.raises(UserError, match="has no 'answer'"):
        train("correct", rows, name="other")
    assert "none of its columns (prompt) is a reference answer" in capsys.readouterr().err


def test_a_dataset_of_hugging_face_is_data(train: Callable[..., baton.Run]) -> None:
    from datasets import Dataset

    run = train(evenness, Dataset.from_list(QUESTIONS))
    same = train(evenness, QUESTIONS, config={"run.directory": "other"})
    assert [Path(r.recipe.task[0].path or "").name for r in (run, same)] == [
        Path(run.recipe.task[0].path or "").name
    ] * 2
    assert run.recipe.task[0].path != same.recipe.task[0].path


def test_a_callback_stops_a_run_that_then_resumes_with_a_changed_recipe(train: Callable[..., baton.Run]) -> None:
    callback = StopAfter(2)
    run = train(evenness, steps=5, callbacks=[callback])
    assert run.status == "stopped"
    assert [(step, status) for step, status, _ in callback.seen] == [(1, "running"), (2, "running")]
    assert callback.seen[1][2]["reward/mean"] == run.metrics()[-1]["reward/mean"]
    with pytest.raises(UserError, match=r"a resumed run keeps its recipe.*rollout\.group_size"):
        run.resume({"rollout.group_size": 2})
    longer = run.resume({"run.steps": 3, "trainer.lr": 1e-5})
    assert (longer.path, longer.status) == (run.path, "finished")
    assert [row["step"] for row in longer.metrics()] == [0, 1, 2, 3]
    assert longer.metrics()[3]["policy/lr"] == pytest.approx(1e-5)


@pytest.mark.parametrize(
    "callbacks", [StopAfter(1), [StopAfter], [print], None], ids=["an object", "a class", "a function", "None"]
)
def test_wrong_callbacks_are_refused_before_a_run_exists(train: Callable[..., baton.Run], callbacks: Any) -> None:
    with pytest.raises(UserError, match=r"^callbacks: got .*, allowed is a list of objects with a method on_step$"):
        train(evenness, callbacks=callbacks)
    assert not Path("runs/r").exists()


def test_a_section_in_config_keeps_the_keys_of_the_other_arguments(train: Callable[..., baton.Run]) -> None:
    sections = {
        "algorithm.kl_coef": 0.25,
        "algorithm": {"clip_low": 0.1, "num_minibatches": 1},
        "run": {"threads": 1, "directory": "other"},
        "eval": {"every": 1},
    }
    recipe = train(evenness, algorithm="dapo", eval_data=QUESTIONS[:3], steps=1, config=sections).recipe
    algorithm = recipe.algorithm
    assert (algorithm.name, algorithm.clip_low, algorithm.kl_coef, recipe.run.steps) == ("dapo", 0.1, 0.25, 1)
    assert recipe.task[0].path.startswith("other/.data/")
    assert (recipe.eval.every, [each.name for each in recipe.eval.task]) == (1, ["data_test"])


def test_ctrl_c_writes_a_checkpoint_and_raises_keyboard_interrupt(train: Callable[..., baton.Run]) -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt, match=r"stopped after step 1; baton\.Run\('runs/r'\)\.resume\(\) continues"):
        train(evenness, steps=5, callbacks=[StopAfter(1, signal.SIGINT)])
    assert signal.getsignal(signal.SIGINT) is before
    run = baton.Run("runs/r")
    assert run.status == "stopped"
    assert (run.path / "checkpoints" / "step_000001").is_dir()


def test_a_function_that_exceeds_its_deadline_stops_the_run_with_a_sentence(train: Callable[..., baton.Run]) -> None:
    released = threading.Event()

    def hangs(response: str) -> float:
        released.wait(600)
        return 1.0

    with pytest.raises(UserError, match=r"reward function '.*:hangs' gave no answer within 0\.2 s, and a thread"):
        train(hangs, config={"judge.deadline_s": 0.2})
    released.set()
    assert baton.Run("runs/r").status == "failed"


def test_a_run_trains_in_another_thread(train: Callable[..., baton.Run]) -> None:
    """Python allows signal handlers in the main thread only."""
    found: list[baton.Run] = []
    thread = threading.Thread(target=lambda: found.append(train(evenness)))
    thread.start()
    thread.join(300)
    assert found[0].status == "finished"


def test_a_recipe_is_loaded_changed_checked_and_written(small: Any) -> None:
    recipe = baton.Recipe.load(small.recipe).override(
        {"algorithm": "dapo", "algorithm.num_minibatches": 2, "trainer.lr": 3e-4}
    )
    assert (recipe.trainer.lr, recipe.algorithm.name, recipe.rollout.dynamic_sampling) == (3e-4, "dapo", True)
    assert recipe.check().trajectories_per_step == 16
    Path("written.toml").write_text(recipe.to_toml())
    assert baton.Recipe.load("written.toml").to_toml() == recipe.to_toml()
    dtypes = {"trainer.dtype": "float32", "engine.dtype": "float32"}  # a run records what "auto" means on its device
    assert baton.Run(small.run).recipe.to_toml() == baton.Recipe.load(small.recipe).override(dtypes).to_toml()
    with pytest.raises(UserError, match=r"override: unknown key trainer\.lrr; did you mean 'lr'"):
        recipe.override({"trainer.lrr": 1})


def test_the_report_is_a_page(small: Any) -> None:
    page = baton.Run(small.run).report()
    assert page == small.run / "report.html"
    assert "<svg" in page.read_text()


def test_the_stub_declares_the_public_names_and_the_import_is_light() -> None:
    stub = Path(baton.__file__).with_suffix(".pyi").read_text()
    assert set(re.findall(r" as (\w+)$|^(\w+)(?: = |: )", stub, flags=re.MULTILINE)) == {
        (name, "") if name not in ("Recipe", "__version__") else ("", name) for name in dir(baton)
    }
    code = (
        "import baton, sys; baton.train; baton.Run; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
    with pytest.raises(AttributeError, match="no attribute 'tran'"):
        baton.tran  # noqa: B018


@pytest.mark.parametrize(("model", "expected"), [("my model@v1", "my-model-v1-"), ("_", "run-")])
def test_a_run_is_named_after_any_model(small: Any, tmp_path: Path, model: str, expected: str) -> None:
    shutil.copytree(small.model, tmp_path / model)
    run = baton.train(tmp_path / model, QUESTIONS, evenness, steps=1, config=CONFIG)
    assert run.path.name.startswith(expected)


def test_several_greedy_samples_are_refused(small: Any) -> None:
    with pytest.raises(UserError, match="samples: got 4 at temperature 0, but all greedy responses"):
        baton.evaluate(small.model, QUESTIONS, evenness, samples=4, config=CONFIG)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"samples": 0}, "samples: got 0, allowed are 1 or more"),
        ({"temperature": -1}, "temperature: got -1, allowed are 0"),
        ({"temperature": math.inf}, "temperature: got inf, allowed are 0"),
        ({"config": [("run.seed", 1)]}, r"config: got \[\('run.seed', 1\)\], allowed is a dict"),
        ({"model": 5}, "there is no directory '5'"),
    ],
)
def test_wrong_arguments_of_an_evaluation_are_refused(small: Any, arguments: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        baton.evaluate(**{"model": small.model, "data": QUESTIONS, "config": CONFIG} | arguments)


def test_the_command_eval_leaves_out_a_function_of_another_process(
    train: Callable[..., baton.Run], caplog: pytest.LogCaptureFixture
) -> None:
    reward = evenness.__class__(evenness.__code__, {}, "own")
    reward.__module__, reward.__qualname__ = "__main__", "own"
    run = train([reward, "format"], config={"eval.at_start": False})
    assert [part.function for part in run.recipe.reward] == ["__main__:own", None]
    del PASSED["__main__:own"]
    (result,) = evaluate_recipe(*evaluated_model(run.path, None), SamplingParams(0, 0.0))
    assert set(result.parts) == {"format"}
    assert "omits the rewards own: only the script that started the training defines their functions" in caplog.text
    with pytest.raises(UserError, match=r"a script passed it to baton\.train; define own"):
        run.resume({"run.steps": 2})


def test_a_preview_without_prompts_is_refused(small: Any) -> None:
    with pytest.raises(UserError, match="n: got 0, allowed are 1 or more prompts"):
        baton.preview(small.model, QUESTIONS, n=0, config=CONFIG)

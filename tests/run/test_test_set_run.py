"""Runs with test sets, without evaluations, and with names on the hub: what is recorded, and what a resume reads."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from baton.console import Console
from baton.errors import UserError
from baton.recipe.load import load_recipe
from baton.recipe.recipe import Recipe
from baton.records.evaluation import Evaluation
from baton.records.metrics import read_metrics
from baton.records.run_directory import RunDirectory
from baton.run.assemble import build_loop, evaluate_recipe, evaluated_model
from baton.run.dry_run import footprint
from baton.run.summary import summarise
from baton.types import SamplingParams
from baton.views.terminal.progress import TerminalObserver
from baton.views.terminal.report import print_evaluations, print_report
from tests.tasks.hub_cache import COMMIT, OLDER, store_dataset, store_model, use_cache


def rows(split: str, count: int) -> list[dict[str, Any]]:
    return [{"question": f"{split} {i}+1=", "answer": f"so\n#### {i + 1}"} for i in range(count)]


def write(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def recipe(small: Any, tmp_path: Path) -> Path:
    """The small recipe with rows of its own, in a folder with its data and reward function."""
    folder = tmp_path / "mine"
    folder.mkdir()
    write(folder / "train.jsonl", rows("a", 40) + rows("b", 5))
    write(folder / "test.jsonl", rows("b", 5))
    (folder / "own_reward.py").write_text("def length(prompt, response, answer):\n    return len(response) % 5 / 5\n")
    text = f"""
    answer = {{ format = "last_number", instruct = false }}
    [run]
    name = "mine"
    directory = "{tmp_path / "runs"}"
    steps = 2
    threads = 1
    [model]
    path = "model"
    device = "cpu"
    [[task]]
    name = "train"
    path = "train.jsonl"
    held_out = "none"
    [[reward]]
    kind = "function"
    function = "own_reward.py:length"
    isolate = false
    [[reward]]
    kind = "correct"
    weight = 0.5
    [rollout]
    batch_groups = 4
    group_size = 4
    max_new_tokens = 8
    [engine]
    slots = 16
    max_context_tokens = 64
    [eval]
    every = 1
    samples = 2
    [[eval.task]]
    name = "test"
    path = "test.jsonl"
    samples = 3
    [[eval.task]]
    name = "sums"
    gym = "chain_sum"
    form = "compact"
    num_prompts = 4
    """
    shutil.copytree(small.model, folder / "model")
    (folder / "mine.toml").write_text(text)
    return folder / "mine.toml"


def train(recipe: Recipe, *, resume: bool = False) -> RunDirectory:
    loop = build_loop(recipe, TerminalObserver(Console(quiet=True), recipe.run.steps), resume=resume, overwrite=False)
    try:
        loop.train()
    finally:
        loop.close()
    return loop.run


def printed(show: Any, *values: Any) -> str:
    console = Console(width=120, file=io.StringIO())
    show(console, *values)
    return console.file.getvalue()  # type: ignore[attr-defined]


def evaluated(path: Path, recipe: Path | None = None, temperature: float = 1.0, **options: Any) -> list[Evaluation]:
    """What `baton eval` finds for the run or the model at a path."""
    return evaluate_recipe(*evaluated_model(path, recipe), SamplingParams(0, temperature), **options)


def test_a_run_scores_its_test_sets_with_their_own_samples_and_never_trains_on_them(recipe: Path) -> None:
    run = train(load_recipe(Recipe, recipe))
    results = {(e.step, e.result.task, e.result.temperature): e.result for e in run.evaluations()}
    assert set(results) == {(s, t, w) for s in (0, 1, 2) for t in ("test", "sums", "all") for w in (0.0, 1.0)}
    at_end = {task: results[2, task, 1.0] for task in ("test", "sums", "all")}
    assert {task: (r.num_prompts, r.samples) for task, r in at_end.items()} == {
        "test": (5, 3),
        "sums": (4, 2),
        "all": (9, 1),  # several numbers of samples: the accuracy of one
    }
    for result in results.values():
        assert result.reward == pytest.approx(result.parts["length"] + 0.5 * result.parts["correct"])
        assert result.accuracy is not None
        assert result.parts["correct"] == pytest.approx(result.accuracy.value)
    metrics = {name for row in read_metrics(run.path) for name in row}
    assert {"eval/test/avg@3", "eval/test/pass@3", "eval/sums/avg@2", "eval/all/avg@1", "eval/test/reward"} <= metrics
    assert {"eval/test/reward/length", "eval/test/greedy_reward"} <= metrics
    assert "eval/all/pass@1" not in metrics
    asked = {g.prompt.messages[-1].content[0] for step in (1, 2) for g in run.groups(step)}
    assert asked == {"a"}, "the rows b are in the test set, too"

    again = evaluated(run.path)
    assert [(r.task, r.num_prompts, r.samples) for r in again] == [("test", 5, 3), ("sums", 4, 1), ("all", 9, 1)]
    fewer = evaluated(run.path, num_prompts=2, samples=4)
    assert [(r.task, r.num_prompts, r.samples) for r in fewer] == [("test", 2, 4), ("sums", 2, 4), ("all", 4, 4)]
    assert " reward " in printed(print_evaluations, fewer)
    report = printed(print_report, summarise(run))
    assert "test, temperature 1, reward" in report


def test_a_test_set_may_be_a_multi_turn_environment(recipe: Path) -> None:
    text = (
        recipe.read_text().replace("max_context_tokens = 64", "max_context_tokens = 128").partition("[[eval.task]]")[0]
    )
    environment = "tests.small_environment:Evenness"
    recipe.write_text(
        f'{text}\n[[eval.task]]\nname = "turns"\nenvironment = "{environment}"\nnum_prompts = 3\nmax_turns = 3\n'
        '[[eval.task]]\nname = "test"\npath = "test.jsonl"\n[environments]\nprocesses = 1\n'
    )
    run = train(load_recipe(Recipe, recipe, ["run.steps=1", "eval.at_start=false", "eval.greedy=false"]))
    found = {e.result.task: e.result for e in run.evaluations()}
    assert {task: r.num_prompts for task, r in found.items()} == {"turns": 3, "test": 5, "all": 8}
    assert found["turns"].reward is not None
    assert all(m.episode is None for g in run.groups(1) for m in g.members), "the run trains on single turns only"
    assert [r.task for r in evaluated(run.path)] == ["turns", "test", "all"]


def test_a_model_is_scored_by_a_recipe_of_test_sets_alone(small: Any, tmp_path: Path) -> None:
    write(tmp_path / "test.jsonl", rows("b", 5))
    (tmp_path / "tests.toml").write_text(
        '[run]\nname = "tests"\nthreads = 1\n[engine]\nmax_context_tokens = 256\n[rollout]\nmax_new_tokens = 8\n'
        '[[eval.task]]\nname = "test"\npath = "test.jsonl"\nanswer = { format = "last_number" }\n'
    )
    (result,) = evaluated(small.model, tmp_path / "tests.toml", samples=2)
    assert (result.task, result.num_prompts, result.samples) == ("test", 5, 2)


def test_evaluations_can_be_switched_off(recipe: Path) -> None:
    loaded = load_recipe(Recipe, recipe, ["eval.enabled=false", "eval.task=[]"])
    assert footprint(loaded).held_out_prompts == 0
    run = train(loaded)
    assert run.evaluations() == []
    assert not [name for row in read_metrics(run.path) for name in row if name.startswith("eval/")]
    assert "no evaluation" in printed(print_report, summarise(run))
    with pytest.raises(UserError, match=r"is complete: 2 of run.steps = 2"):
        train(loaded, resume=True)
    assert len(run.groups(2)) == 4
    longer = load_recipe(Recipe, recipe, ["eval.enabled=false", "eval.task=[]", "run.steps=3"])
    assert train(longer, resume=True).recorded_steps() == [1, 2, 3]


def test_all_rows_are_trained_only_beside_a_test_set_or_without_evaluations(recipe: Path) -> None:
    with pytest.raises(UserError, match=r"task.held_out: got \"none\", but evaluations use held-out problems; add an"):
        load_recipe(Recipe, recipe, ["eval.task=[]"])


def test_paths_are_found_beside_the_recipe_and_overrides_where_the_command_is_given(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    found = load_recipe(Recipe, Path("mine/mine.toml"))
    assert (found.model.path, found.task[0].path, found.eval.task[0].path) == (
        "mine/model",
        "mine/train.jsonl",
        "mine/test.jsonl",
    )
    assert found.reward[0].function == "mine/own_reward.py:length"
    changed = load_recipe(Recipe, Path("mine/mine.toml"), ["task.0.path=train.jsonl", "model.path=elsewhere/model"])
    assert (changed.task[0].path, changed.model.path) == ("train.jsonl", "elsewhere/model")
    write(tmp_path / "train.jsonl", rows("c", 3))
    (recipe.parent / "train.jsonl").unlink()  # a path that is not beside the recipe is one from here
    assert load_recipe(Recipe, Path("mine/mine.toml")).task[0].path == "train.jsonl"
    monkeypatch.chdir(recipe.parent)
    assert load_recipe(Recipe, Path("mine.toml")).model.path == "model", "as written, so that old runs resume"


def test_a_run_names_the_commits_of_its_model_and_data_and_keeps_them(
    small: Any, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = use_cache(tmp_path / "hf", monkeypatch)
    store_model(hub, "some/model", small.model, OLDER)
    store_dataset(hub, "some/sums", {"main": {"train": rows("a", 40), "test": rows("b", 5)}}, OLDER)
    overrides = ["model.path=some/model", "task.0.path=some/sums", "eval.task.0.path=some/sums"]
    run = train(load_recipe(Recipe, recipe, overrides))
    recorded = run.recipe()
    assert recorded["model"]["path"] == f"some/model@{OLDER}"
    assert recorded["task"][0]["path"] == recorded["eval"]["task"][0]["path"] == f"some/sums@{OLDER}"
    assert {e.result.num_prompts for e in run.evaluations() if e.result.task == "test"} == {5}

    store_dataset(hub, "some/sums", {"main": {"train": rows("new", 40), "test": rows("b", 9)}}, COMMIT)
    (hub / "models--some--model" / "refs" / "main").write_text(COMMIT)  # a commit that is not in the cache
    again = train(load_recipe(Recipe, recipe, [*overrides, "run.steps=3"]), resume=True)
    assert again.recipe()["task"][0]["path"] == f"some/sums@{OLDER}"
    assert {e.result.num_prompts for e in again.evaluations() if e.result.task == "test"} == {5}
    assert {g.prompt.messages[-1].content[0] for g in again.groups(3)} == {"a"}
    with pytest.raises(
        UserError, match=r"model.path: 'some/model' is neither a directory nor in the Hugging Face cache"
    ):
        train(load_recipe(Recipe, recipe, [*overrides, "run.name=other"]))


def test_an_adapter_names_the_commit_of_its_base(
    small: Any, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store_model(use_cache(tmp_path / "hf", monkeypatch), "some/model", small.model)
    run = train(load_recipe(Recipe, recipe, ["model.path=some/model", "lora.rank=2", "eval.greedy=false"]))
    config = json.loads((run.checkpoints / "step_000002" / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == ("some/model", COMMIT)
    assert [r.task for r in evaluated(run.path, num_prompts=2)] == ["test", "sums", "all"]

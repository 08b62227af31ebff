"""docs/api.md: its examples run in order, as one script, and it names every public name. Model and dataset of its first
example are in the layout of the hub cache; the model is the shipped one, and the rows are made by hand."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import baton
from tests.tasks.hub_cache import store_dataset, store_model, use_cache

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
SMALL = {
    "run.threads": 1,
    "answer.instruct": False,
    "rollout.batch_groups": 2,
    "rollout.group_size": 4,
    "rollout.max_new_tokens": 16,
    "engine.slots": 8,
    "engine.max_context_tokens": 128,
    "eval.num_prompts": 2,
    "algorithm.num_minibatches": 1,
    "rollout.dynamic_sampling": False,
}
"""Makes the runs of the page small, so that the test takes seconds."""


def made_small(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, config: dict[str, Any] | None = None, **others: Any) -> Any:
        if "steps" in others:
            others["steps"] = min(others["steps"], 2)
        return function(*arguments, config=SMALL | (config or {}), **others)

    return call


def warm_start(function: Callable[..., Any], recipe: str, config: dict[str, Any]) -> Any:
    """Run a warm start of a few updates."""
    small = {"run.threads": 1, "sft.steps": 2, "sft.warmup_steps": 0, "sft.batch_size": 4, "eval.enabled": False}
    return function(recipe, small | config)


def test_the_page_names_every_public_name() -> None:
    assert not [name for name in dir(baton) if name[0] != "_" and f"baton.{name}" not in PAGE]


def test_every_name_of_the_package_on_the_page_exists() -> None:
    assert "UserError" in PAGE
    assert issubclass(baton.UserError, ValueError)
    assert not [name for name in re.findall(r"`baton\.(\w+)", PAGE) if not hasattr(baton, name)]


def test_the_readme_makes_the_call_of_the_first_example() -> None:
    """By position, for the width of its page."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8").partition("```python\n")[2].partition("```")[0]
    begin, call = readme.split("run = ")
    assert EXAMPLES[0].startswith(begin)
    assert arguments_of(call) == arguments_of(EXAMPLES[0].split("run = ")[1])


def arguments_of(code: str) -> dict[str, Any]:
    """Return the arguments of a call of baton.train by name, as they are written."""
    call = next(node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call) and node.args)
    named = {str(keyword.arg): ast.unparse(keyword.value) for keyword in call.keywords}
    return inspect.signature(baton.train).bind(*map(ast.unparse, call.args), **named).arguments


def gsm8k(count: int, offset: int) -> list[dict[str, Any]]:
    """Rows with the columns and the form of answers of GSM8K."""
    numbers = range(offset, offset + count)
    return [
        {"question": f"Ann has {i} pens, Bo {i % 9}. All?", "answer": f"{i} + {i % 9}\n#### {i + i % 9}"}
        for i in numbers
    ]


def test_the_examples_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = use_cache(tmp_path, monkeypatch)
    store_dataset(hub, "openai/gsm8k", {"main": {"train": gsm8k(40, 1), "test": gsm8k(4, 900)}})
    store_model(hub, "Qwen/Qwen2.5-0.5B-Instruct", ROOT / "models" / "quickstart")
    for name in ("models", "recipes"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    for function in (baton.train, baton.preview, baton.evaluate):
        monkeypatch.setattr(baton, function.__name__, made_small(function), raising=False)
    monkeypatch.setattr(baton.sft, "sft", partial(warm_start, baton.sft.sft))
    load = baton.Recipe.load
    monkeypatch.setattr(baton.Recipe, "load", lambda path: load(path).override(SMALL))
    names: dict[str, object] = {}
    for example in EXAMPLES:
        exec(compile(example, "docs/api.md", "exec"), names)
    found = {path.name for path in (tmp_path / "runs").iterdir() if not path.name.startswith((".", "Qwen2.5-"))}
    assert found == {"graded", "quickstart", "rows", "short", "warm"}
    assert (tmp_path / "warm" / "config.json").is_file()

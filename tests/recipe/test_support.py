"""support.toml: every test that it names exists, what it refuses is refused, and the docs are its rendering.

`python -m tests.recipe.test_support` writes its parts of docs/support.md and docs/gaps.md.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any, get_args

import pytest
from transformers import CONFIG_MAPPING
from typer.testing import CliRunner

from baton.cli.main import app
from baton.errors import UserError
from baton.recipe.load import load_recipe
from baton.recipe.recipe import Recipe
from baton.recipe.support import (
    SupportEntry,
    check_support,
    experimental_parts,
    support_table,
)
from baton.rollout.engine import EngineSettings
from baton.rollout.settings import RolloutSettings
from baton.run.dry_run import footprint
from baton.trainer.algorithm import PRESETS
from tests.model_families import tiny_config
from tests.recipe.support_pages import support_gaps, support_page

ROOT = Path(__file__).parents[2]
PAGES = {ROOT / "docs" / "support.md": support_page, ROOT / "docs" / "gaps.md": support_gaps}
BETWEEN = re.compile(r"(<!-- support: [^\n]* -->\n).*?(<!-- /support -->)", re.DOTALL)
ENTRIES = support_table().support
PLAIN = {axis.name: (axis.default,) for axis in support_table().axis}


def one(entry: SupportEntry) -> dict[str, tuple[str, ...]]:
    """A run that an entry is about, and that is the default in all else."""
    return {**PLAIN, **{axis: values[:1] for axis, values in entry.when.items()}}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_a_page_is_what_the_table_renders(page: Path) -> None:
    found = BETWEEN.search(page.read_text(encoding="utf-8"))
    assert found is not None, "the markers are missing"
    assert found[0] == f"{found[1]}\n{PAGES[page]()}\n{found[2]}", "run python -m tests.recipe.test_support"


def test_every_test_that_is_named_exists() -> None:
    for entry in ENTRIES:
        if not entry.test:
            continue
        file, _, name = entry.test.partition("::")
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, entry.test


def test_an_entry_says_one_thing_of_known_axes_and_no_value_is_described_twice() -> None:
    for entry in ENTRIES:
        assert entry.when
        assert entry.when.keys() <= PLAIN.keys()
        assert [bool(text) for text in (entry.test, entry.experimental, entry.refused)].count(True) == 1
    for axis in PLAIN:
        alone = [v for e in ENTRIES if len(e.when) == 1 for v in e.when.get(axis, ())]
        assert len(alone) == len(set(alone))


def test_every_value_that_a_recipe_can_have_is_in_the_table() -> None:
    described = {axis: {v for entry in ENTRIES for v in entry.when.get(axis, ())} for axis in PLAIN}
    for owner, key, axis in (
        (RolloutSettings, "mode", "mode"),
        (RolloutSettings, "placement", "placement"),
        (EngineSettings, "kind", "engine"),
    ):
        assert set(get_args(owner.model_fields[key].annotation)) == described[axis]
    assert set(PRESETS) == described["algorithm"]
    assert described["architecture"] <= set(CONFIG_MAPPING)


@pytest.mark.parametrize("entry", [e for e in ENTRIES if e.refused], ids=lambda e: " ".join(e.when))
def test_what_the_table_refuses_is_refused_in_one_sentence(entry: SupportEntry) -> None:
    with pytest.raises(UserError) as refused:
        check_support(one(entry))
    sentence = str(refused.value)
    assert "\n" not in sentence
    assert "{" not in sentence
    assert re.search(r"; (use|set|remove|plan) ", sentence), "it says what to use instead"


@pytest.mark.parametrize("entry", [e for e in ENTRIES if not e.refused], ids=lambda e: " ".join(e.when))
def test_what_is_tested_starts_without_a_line_and_what_is_experimental_with_one(entry: SupportEntry) -> None:
    check_support(one(entry))
    parts = experimental_parts(one(entry))
    assert bool(parts) == bool(entry.experimental)
    assert not entry.experimental or entry.experimental in parts[0]


def test_what_nobody_has_tested_is_experimental() -> None:
    assert experimental_parts(PLAIN) == ()
    assert experimental_parts({"architecture": ("new_family",)}) == ("architecture new_family (no test covers it)",)
    pair = {**PLAIN, "mode": ("partial",), "trainer": ("tensor_parallel",)}
    assert experimental_parts(pair) == ("mode partial with trainer tensor_parallel (no test covers the two together)",)
    assert experimental_parts({**PLAIN, "mode": ("async",), "algorithm": ("gspo",), "workers": ("swarm",)}) == ()


@pytest.mark.parametrize(
    ("overrides", "on"),
    [
        ([], {}),
        (["engine.processes=2", "rollout.mode=async"], {"workers": "processes", "mode": "async"}),
        (["swarm.workers=2", "lora.rank=2"], {"workers": "swarm", "weights": "lora"}),
        (["trainer.ranks=4", "trainer.shard_size=2"], {"trainer": "copies"}),
        (["trainer.ranks=4", "trainer.tensor_parallel=2"], {"trainer": "tensor_parallel"}),
        (["trainer.ranks=4"], {"trainer": "ranks"}),
        (["trainer.compile=true", "algorithm=rloo"], {"trainer": "compiled", "algorithm": "rloo"}),
        (["rollout.placement=colocated"], {"placement": "colocated"}),
        (['reward=[{kind="model", model="m"}]'], {"reward": "classifier"}),
        (['reward=[{kind="format"}, {kind="model", model="m", template="{response}"}]'], {"reward": "generative"}),
        (["engine.kind=vllm", "rollout.mode=async"], {"engine": "vllm", "mode": "async"}),
    ],
)
def test_a_recipe_is_found_on_the_axes(small: Any, overrides: list[str], on: dict[str, str]) -> None:
    found = load_recipe(Recipe, small.recipe, overrides).choices()
    expected = {**PLAIN, **{axis: (value,) for axis, value in on.items()}}
    assert found == {axis: expected[axis] for axis in found}
    assert PLAIN.keys() - found.keys() == {"architecture", "platform", "plan"}


def test_adapters_with_shared_products_are_refused_when_the_recipe_is_loaded(small: Any) -> None:
    with pytest.raises(UserError, match=r"the tensor-parallel plans of models do not cover adapters") as refused:
        load_recipe(Recipe, small.recipe, ["trainer.ranks=2", "trainer.tensor_parallel=2", "lora.rank=2"])
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("family", ["qwen3_next", "mamba", "lfm2"])
def test_a_model_with_a_recurrent_state_is_refused_by_its_configuration(
    family: str, small: Any, tmp_path: Path
) -> None:
    tiny_config(family).save_pretrained(tmp_path)
    recipe = load_recipe(Recipe, small.recipe, [f"model.path={tmp_path}"])
    from baton.run.dry_run import check_room

    with pytest.raises(UserError, match=f"model.path: {family} has a recurrent or convolutional state") as refused:
        check_room(recipe, is_here=True)
    assert "\n" not in str(refused.value)
    unlike = load_recipe(Recipe, small.recipe, [f"model.path={tmp_path}", "engine.kind=vllm"])
    check_room(unlike, is_here=False)  # what the embedded engine cannot do, another may


def test_a_dry_run_shows_what_is_experimental(small: Any, tmp_path: Path) -> None:
    def shown(*overrides: str) -> str:
        done = CliRunner().invoke(
            app, ["train", str(small.recipe), f"run.directory={tmp_path}", *overrides, "--dry-run"]
        )
        assert done.exit_code == 0, done.output
        return done.output

    assert "support     tested\n" in shown()
    assert "support     experimental: engine sglang (tested against a server" in shown("engine.kind=sglang")
    assert footprint(load_recipe(Recipe, small.recipe)).experimental == ()


def test_a_start_says_once_what_is_experimental(small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from baton.console import Console
    from baton.run.assemble import build_loop
    from baton.views.terminal.progress import TerminalObserver

    said: list[str] = []
    monkeypatch.setattr(TerminalObserver, "said", lambda self, sentence: said.append(sentence))
    monkeypatch.setattr("baton.run.dry_run.Recipe.choices", lambda self: {"engine": ("new",)})
    recipe = load_recipe(Recipe, small.recipe, [f"run.directory={tmp_path}"])
    build_loop(recipe, TerminalObserver(Console(quiet=True), 3), resume=False, overwrite=False).close()
    assert [line for line in said if "experimental" in line] == ["experimental: engine new (no test covers it)"]


if __name__ == "__main__":
    for path, render in PAGES.items():
        text = path.read_text(encoding="utf-8")
        path.write_text(BETWEEN.sub(lambda m, r=render: f"{m[1]}\n{r()}\n{m[2]}", text), encoding="utf-8")

"""Recipes: what is written is what runs, every mistake is one sentence, every key is documented."""

from __future__ import annotations

import importlib
import pkgutil
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w

import baton
from baton.errors import UserError
from baton.files import seal
from baton.recipe.keys import recipe_keys
from baton.recipe.load import load_recipe
from baton.recipe.recipe import Recipe, TaskRecipe, WarmStart
from baton.records.run_directory import without_none
from baton.rollout.settings import RolloutSettings
from baton.settings import Settings
from baton.trainer.algorithm import PRESETS, AlgorithmSettings

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.toml"))
BASE = """
[run]
name = "mine"

[model]
path = "some/model"

[[task]]
name = "chain_sum"
"""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(BASE)
    return path


def kind_of(path: Path) -> type[Recipe] | type[WarmStart]:
    return WarmStart if "output" in tomllib.loads(path.read_text()) else Recipe


def complaint(path: Path, *overrides: str, kind: type[Any] = Recipe) -> str:
    """The sentences of a recipe that is refused; each begins with the file's name."""
    with pytest.raises(UserError) as caught:
        load_recipe(kind, path, overrides)
    return str(caught.value)


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_the_recipes_of_the_repository_load_and_come_back_from_what_a_run_writes(path: Path, tmp_path: Path) -> None:
    loaded = load_recipe(kind_of(path), path)
    assert loaded.run.name == path.stem
    written = tmp_path / "recipe.toml"
    written.write_text(tomli_w.dumps(without_none(loaded.model_dump(mode="json"))))
    assert load_recipe(kind_of(path), written) == loaded
    if loaded.task:
        assert load_recipe(TaskRecipe, written).task == loaded.task


def test_a_resolved_recipe_holds_every_key_and_loads_as_the_same(base: Path, tmp_path: Path) -> None:
    odd = [
        "trainer.max_grad_norm=inf",
        "trainer.max_mismatch_kl=[0.5, inf]",
        'rollout.stop=["\\n", "\\u0007"]',
        "trainer.lr=1e-7",
        "task.0.params.min_terms=3",
    ]
    loaded = load_recipe(Recipe, base, odd)
    tree = without_none(loaded.model_dump(mode="json"))
    assert tree["algorithm"]["num_epochs"] == 1, "defaults are written, too"
    written = tmp_path / "recipe.toml"
    written.write_text(tomli_w.dumps(tree))
    again = load_recipe(Recipe, written)
    assert again == loaded
    assert (again.trainer.max_grad_norm, again.trainer.max_mismatch_kl) == (float("inf"), (0.5, float("inf")))
    assert again.rollout.stop == ("\n", "\x07")


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("trainer.lr=3e-6", "trainer", "lr", 3e-6),
        ("trainer.lr = 1", "trainer", "lr", 1.0),
        ("run.seed=7", "run", "seed", 7),
        ("run.name=other-run", "run", "name", "other-run"),
        ('run.name="quoted"', "run", "name", "quoted"),
        ("model.path=models/Qwen3-0.6B", "model", "path", "models/Qwen3-0.6B"),
        ("model.path=/a=b", "model", "path", "/a=b"),
        ("eval.greedy=false", "eval", "greedy", False),
        ('rollout.stop=["a", "b"]', "rollout", "stop", ("a", "b")),
        ("trainer.betas=[0.5, 0.25]", "trainer", "betas", (0.5, 0.25)),
    ],
)
def test_overrides_are_toml_values_or_bare_words(base: Path, override: str, section: str, key: str, value: Any) -> None:
    found = getattr(getattr(load_recipe(Recipe, base, [override]), section), key)
    assert (type(found), found) == (type(value), value)


def test_overrides_reach_into_lists_and_later_ones_win(base: Path) -> None:
    loaded = load_recipe(Recipe, base, ["task.0.params.max_terms=9", "task.0.weight=2", "task.0.weight=3"])
    assert loaded.task[0].params == {"max_terms": 9}
    assert loaded.task[0].weight == 3.0


@pytest.mark.parametrize("override", ["trainer.lr", "=3", "task.7.weight=1", "task.first.weight=1", "run.name.x=1"])
def test_an_override_that_fits_nowhere_is_named(base: Path, override: str) -> None:
    sentence = complaint(base, override)
    assert repr(override) in sentence
    assert "\n" not in sentence


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("trainer.learning_rate=1", "unknown key trainer.learning_rate; known are "),
        ("algorithm.preset=grpo", "unknown key algorithm.preset; known are "),  # no key is similar enough for a hint
        ("trainer.warmup=1", "unknown key trainer.warmup; did you mean 'warmup_steps'?"),
        ("trianer.lr=1", "unknown key trianer; did you mean 'trainer'?"),
        ("task.0.wieght=1", "unknown key task.0.wieght; did you mean 'weight'?"),
        ("rollout.batch_group=1", "unknown key rollout.batch_group; did you mean 'batch_groups'?"),
        ("weights.path=chunks", "weights.path was removed: workers always fetch versions as chunks; remove the key"),
        (
            "log.trace_mb=9",
            "log.trace_mb was removed: a trace has at most 32 MB; log.trace = false disables it; remove",
        ),
        (
            "fleet.max_restarts=9",
            "fleet.max_restarts was removed: a run on a cluster always restarts its trainer up to 3",
        ),
        ("engine.vllm.prefix_caching=false", "engine.vllm.prefix_caching was removed: vLLM always prefills common"),
        ("swarm.silence_s=9", "swarm.silence_s is now called swarm.heartbeat_timeout_s"),
        ("swarm.relief=0", "swarm.relief is now called swarm.backup_lease_factor"),
        ("trainer.lr=fast", "trainer.lr: got 'fast', input should be a valid number"),
        ("trainer.lr=0", "trainer.lr: got 0, input should be greater than 0"),
        ("trainer.lr=1e999", "trainer.lr: got inf, input should be a finite number"),
        ("trainer.max_grad_norm=nan", "trainer.max_grad_norm: got nan, "),
        ("trainer.max_logprob_diff=[nan, 9]", "trainer.max_logprob_diff: got [nan, 9], must be two numbers above 0"),
        ("algorithm.value_clip=nan", "algorithm.value_clip: got nan, "),
        ("eval.temperature=inf", "eval.temperature: got inf, input should be a finite number"),
        ("eval.max_new_tokens=0", "eval.max_new_tokens: got 0, input should be greater than or equal to 1"),
        pytest.param(f"run.seed={'9' * 5000}", f"run.seed: got '{'9' * 199}…, ", id="too many digits"),
        ("trainer.betas=[0.9, 1.0]", "trainer.betas: got [0.9, 1.0], each must be at least 0 and less than 1"),
        ("algorithm.name=gppo", "algorithm.name: got 'gppo', allowed are grpo, dr_grpo, "),
        (
            "answer.format=xml",
            "answer.format: got 'xml', input should be 'tags', 'boxed', 'last_line', 'last_number', ",
        ),
        ("answer.format=regex", 'answer: pattern belongs to format = "regex", which requires it'),
        ("engine.dtype=float16", "engine.dtype: got 'float16', input should be 'auto', 'float32' or 'bfloat16'"),
        ("run.name=a/b", "run.name: got 'a/b', string should match pattern"),
        ("run.steps=0", "run.steps: got 0, input should be greater than or equal to 1"),
        ("run=5", "run: got 5, input should be a valid dictionary"),
        ("model={}", "model.path is missing"),
    ],
)
def test_a_wrong_key_or_value_is_one_sentence_with_what_is_allowed(base: Path, override: str, sentence: str) -> None:
    found = complaint(base, override)
    assert found.startswith(f"{base}: ")
    assert sentence in found
    assert "\n" not in found


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["rollout.group_size=1"], "rollout.group_size: got 1, but grpo compares the trajectories of a group"),
        (
            ["rollout.max_new_tokens=1024"],
            "engine.max_context_tokens: got 1024, but a prompt with its response has up to 1024 tokens",
        ),
        (["eval.max_new_tokens=2000"], "but a prompt with its response has up to 2000 tokens"),
        (["algorithm.num_minibatches=33"], "algorithm.num_minibatches: got 33, but a batch has only"),
        (["weights.transport=sparse"], 'weights.transport: got "sparse" with engine.kind = "embedded", but'),
        (
            ["weights.transport=sparse", "engine.kind=vllm", "engine.vllm.quantization=fp8"],
            'weights.transport: got "sparse" with engine.vllm.quantization, but quantised weights',
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused_in_one_sentence(
    base: Path, overrides: list[str], sentence: str
) -> None:
    found = complaint(base, *overrides)
    assert sentence in found
    assert "\n" not in found


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "give exactly one of [model] (fine-tune a model) and [scratch]"),
        ('[model]\npath = "m"\n[scratch]', "give exactly one of [model] (fine-tune a model) and [scratch]"),
        ("[scratch]", "give exactly one of [demonstrations] (generated from [[task]]) and data (a file)"),
        ("[scratch]\n[demonstrations]", "[demonstrations] needs at least one [[task]]"),
    ],
)
def test_a_warm_start_needs_one_model_and_one_source(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "warm.toml"
    path.write_text(f'output = "out"\n[run]\nname = "warm"\n{text}\n')
    assert sentence in complaint(path, kind=WarmStart)


def test_two_mistakes_are_two_lines(base: Path) -> None:
    lines = complaint(base, "trainer.lr=0", "run.seeds=1").splitlines()
    assert len(lines) == 2
    assert all(line.startswith(f"{base}: ") for line in lines)


def test_a_missing_recipe_names_the_nearest_and_a_broken_one_the_place(base: Path) -> None:
    assert f"did you mean {base}?" in complaint(base.with_name("mime.toml"))
    base.write_text(BASE + "\n[rollout\n")
    assert f"{base} is not valid TOML: " in complaint(base)
    base.write_bytes(b'[run]\nname = "\xff"\n')
    assert f"{base} is not valid TOML: " in complaint(base)
    base.write_text(f"[run]\nseed = {'9' * 5000}\n")
    assert f"{base} is not valid TOML: " in complaint(base)


def test_paths_in_a_recipe_are_relative_to_its_directory_if_the_files_exist_there(tmp_path: Path) -> None:
    for name in ("own.py", "scorer"):
        (tmp_path / name).touch()
    tools = 'tools = ["own.py:add", "package.own:add", "absent.py:add"]\nparams = { reward = "own.py:score" }\n'
    reward = '[[reward]]\nkind = "model"\nmodel = "scorer"\n'
    reward += '[[reward]]\nkind = "http"\nurl = "http://h"\nmodel = "scorer"\n'
    path = tmp_path / "mine.toml"
    path.write_text(f'{BASE}{tools}[[eval.task]]\nname = "test"\n{tools}{reward}template = "{{response}}"\n')
    loaded = load_recipe(Recipe, path)
    for task in (*loaded.task, *loaded.eval.task):
        assert task.tools == (f"{tmp_path}/own.py:add", "package.own:add", "absent.py:add")
        assert task.params == {"reward": f"{tmp_path}/own.py:score"}
    assert [part.model for part in loaded.reward] == [f"{tmp_path}/scorer", "scorer"]


def all_settings() -> list[type[Settings]]:
    for module in pkgutil.walk_packages(baton.__path__, "baton."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    found, waiting = [], [Settings]
    while waiting:
        children = waiting.pop().__subclasses__()
        found += children
        waiting += children
    return found


def test_every_key_of_every_section_is_documented() -> None:
    sections = all_settings()
    assert len(sections) >= 15
    for owner in sections:
        assert owner.__doc__, owner
        for name, field in owner.model_fields.items():
            is_section = any(name in (key.section, f"[{key.section}]") for key in recipe_keys())
            assert field.description or is_section, f"{owner.__name__}.{name} has no docstring"


def test_the_list_of_keys_is_complete_and_each_has_a_meaning() -> None:
    keys = recipe_keys()
    known = {(key.section.strip("[]"), key.key) for key in keys}
    for kind in (Recipe, WarmStart):
        for section, field in kind.model_fields.items():
            owner = next((s for s in all_settings() if s.__name__ in str(field.annotation)), None)
            for name in owner.model_fields if owner else (section,):
                is_section = owner is not None and any(name == s.removeprefix(f"{section}.") for s, _ in known)
                assert (section if owner else "", name) in known or is_section
    assert all(key.meaning and key.type for key in keys)
    assert {key.section.strip("[]") for key in recipe_keys("trainer")} == {"trainer"}
    assert next(key.type for key in keys if key.key == "max_mismatch_kl") == "tuple[float, float]"
    with pytest.raises(UserError, match="did you mean 'trainer'"):
        recipe_keys("trianer")


# ---- algorithms ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_named_in_one_word_and_overridden_field_by_field(tmp_path: Path, name: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(f'algorithm = "{name}"\n{BASE}')
    preset = load_recipe(Recipe, path).algorithm
    assert preset.name == name
    assert {key: getattr(preset, key) for key in PRESETS[name].sets} == dict(PRESETS[name].sets)
    assert preset.overrides == {}
    changed = load_recipe(Recipe, path, ["algorithm.num_minibatches=2", "algorithm.clip_high=0.33"]).algorithm
    assert changed.overrides == {"num_minibatches": 2, "clip_high": 0.33}
    assert changed.model_copy(update=changed.overrides) == changed
    assert changed.aggregation == preset.aggregation
    tree = without_none(load_recipe(Recipe, path).model_dump(mode="json"))
    (tmp_path / "resolved.toml").write_text(tomli_w.dumps(tree))
    assert load_recipe(Recipe, tmp_path / "resolved.toml").algorithm == preset


def test_a_table_and_a_command_line_name_presets_as_well(base: Path) -> None:
    assert load_recipe(Recipe, base, ["algorithm=gspo"]).algorithm == AlgorithmSettings(name="gspo")
    later = load_recipe(Recipe, base, ["algorithm=gspo", "algorithm.num_minibatches=2"]).algorithm
    assert (later.objective, later.num_minibatches) == ("gspo", 2)
    base.write_text(BASE + '[algorithm]\nname = "dapo"\nclip_high = 0.3\n')
    assert load_recipe(Recipe, base).algorithm.overrides == {"clip_high": 0.3}
    assert load_recipe(Recipe, base, ["algorithm=grpo"]).algorithm.overrides == {}  # a name alone begins afresh


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["algorithm=gspo", "algorithm.correction=bypass"], "algorithm.correction: got 'bypass', but GSPO's ratio is"),
        (["algorithm=gspo", "algorithm.advantage=gae"], "algorithm.objective: gspo gives a trajectory one ratio"),
        (["algorithm=dapo", "rollout.batch_groups=8"], "algorithm.num_minibatches: got 16, but a batch has only"),
        (["algorithm=dapo", "algorithm.overlong_frac=1"], "algorithm.overlong_frac: got 1, "),
        (["algorithm.entropy=1"], "unknown key algorithm.entropy; did you mean 'entropy_coef'?"),
    ],
)
def test_algorithms_that_do_not_fit_are_refused(base: Path, overrides: list[str], sentence: str) -> None:
    assert sentence in complaint(base, *overrides)


def test_a_group_of_one_is_for_algorithms_that_compare_nothing(base: Path) -> None:
    for name, preset in PRESETS.items():
        overrides = [f"algorithm={name}", "rollout.group_size=1", "rollout.dynamic_sampling=false"]
        if preset.sets.get("advantage") in ("gae", "return_to_go"):
            assert load_recipe(Recipe, base, overrides).rollout.group_size == 1
        else:
            assert "an algorithm without groups (reinforce_pp, ppo)" in complaint(base, *overrides)


def notes(name: str = "grpo", rollout: dict[str, object] | None = None, **changes: object) -> list[str]:
    return AlgorithmSettings(name=name, **changes).notes({"dynamic_sampling": False, **(rollout or {})})


def test_what_a_user_should_know_of_an_algorithm_is_said() -> None:
    assert notes() == []
    assert "clipping has no effect" in notes(clip_high=0.3)[-1]
    assert "clipping has no effect" in notes("dapo", num_minibatches=1)[-1]
    assert notes("gspo") == []
    assert notes("gspo", clip_high=0.1) == ["algorithm gspo, but with clip_high = 0.1"]
    assert "gradient of mean 0" in notes(num_epochs=2, kl_coef=0.1, kl_estimator="k1")[1]
    assert notes("rloo") == []  # it has no clip that could be idle


def test_a_preset_sets_rollout_keys_and_the_recipes_own_win(base: Path) -> None:
    assert not load_recipe(Recipe, base).rollout.dynamic_sampling
    assert load_recipe(Recipe, base, ["algorithm=dapo", "algorithm.num_minibatches=1"]).rollout.dynamic_sampling
    own = ["algorithm=dapo", "algorithm.num_minibatches=1", "rollout.dynamic_sampling=false"]
    recipe = load_recipe(Recipe, base, own)
    assert not recipe.rollout.dynamic_sampling
    assert recipe.algorithm.notes(recipe.rollout.model_dump())[0] == (
        "algorithm dapo, but with num_minibatches = 1, rollout.dynamic_sampling = False"
    )
    assert notes("dapo", {"dynamic_sampling": True}) == ["algorithm dapo sets rollout.dynamic_sampling = True"]
    sections = dict(recipe)  # also where sections come as objects
    assert not Recipe(**sections).rollout.dynamic_sampling
    assert Recipe(**{**sections, "rollout": RolloutSettings(group_size=2)}).rollout.dynamic_sampling


def test_a_correction_brings_its_papers_bounds_unless_the_recipe_or_preset_has_its_own() -> None:
    def bounds(**given: object) -> tuple[float, float]:
        found = AlgorithmSettings(**given)
        return found.weight_floor, found.weight_cap

    assert bounds() == (0.5, 2.0)  # truncated importance sampling has no floor
    assert bounds(correction="icepop") == (0.5, 5.0)
    assert bounds(correction="icepop", weight_cap=3.0) == (0.5, 3.0)
    assert bounds(name="decoupled_ppo") == (0.0, 5.0)  # AReaL drops above 5 only
    assert bounds(name="decoupled_ppo", correction="icepop") == (0.5, 5.0)
    assert AlgorithmSettings(name="decoupled_ppo").correction == "icepop"


@pytest.mark.parametrize(
    ("overrides", "may_pause"),
    [
        ([], True),
        (["engine.processes=1"], False),
        (["rollout.placement=colocated"], False),
        (["engine.kind=vllm"], False),
        (["swarm.workers=1"], False),
    ],
)
def test_only_an_embedded_engine_in_the_trainers_process_may_keep_leases_while_nothing_is_generated(
    base: Path, overrides: list[str], may_pause: bool
) -> None:
    rules = load_recipe(Recipe, base, ["rollout.mode=partial", "rollout.on_new_version=keep", *overrides]).rules()
    assert (rules.may_pause, rules.pauses) == (may_pause, may_pause)
    resumed = load_recipe(Recipe, base, ["rollout.mode=partial", *overrides]).rules()
    assert not resumed.pauses


def test_a_kl_in_the_reward_of_a_standardised_group_warns() -> None:
    settings = {"kl_coef": 0.1, "kl_in": "reward", "num_epochs": 2}
    assert "(such as 5e-4)" in notes(**settings)[-1]
    for harmless in ({"kl_coef": 0.0}, {"kl_in": "loss"}, {"advantage": "group_mean"}, {"advantage": "leave_one_out"}):
        assert not any("5e-4" in note for note in notes(**{**settings, **harmless}))


def test_a_runs_directory_as_model_path_is_its_newest_intact_checkpoint(base: Path, tmp_path: Path) -> None:
    run = tmp_path / "earlier"
    for step in (2, 10):
        (run / "checkpoints" / f"step_{step:06d}" / "baton").mkdir(parents=True)
        (run / "checkpoints" / f"step_{step:06d}" / "baton" / "state.json").write_text("{}")
        seal(run / "checkpoints" / f"step_{step:06d}")
    (run / "run.json").write_text("{}")
    chosen = [f"model.path={run}"]
    assert load_recipe(Recipe, base, chosen).model.path == str(run / "checkpoints" / "step_000010")
    (run / "checkpoints" / "step_000010" / "baton" / "state.json").write_text("{ }")  # not what was written
    assert load_recipe(Recipe, base, chosen).model.path == str(run / "checkpoints" / "step_000002")
    shutil.rmtree(run / "checkpoints")
    assert f"model.path: the run {run} has no checkpoint" in complaint(base, *chosen)

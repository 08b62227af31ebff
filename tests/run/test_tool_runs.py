"""Runs whose episodes call functions: from a recipe file and from Python, with a chat template that renders tools."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

import baton
from baton.cli.main import app
from baton.environments.token_bridge import TokenBridge
from baton.environments.tools import tool_schema
from baton.errors import UserError
from baton.policy.new_model import scratch_model
from baton.policy.settings import ScratchSettings
from baton.policy.tokenizer import load_tokenizer
from baton.recipe.load import load_recipe
from baton.recipe.recipe import Recipe
from baton.records.run_directory import RunDirectory
from baton.run.dry_run import footprint
from baton.run.tokenization import PromptEncoder
from baton.tasks.stream import TaskSettings
from baton.trainer.settings import SftSettings
from baton.trainer.sft import Demonstration, fine_tune
from baton.types import Author, Message
from tests.environments.bridge_cases import SPECIAL, TEMPLATES, trained_tokenizer
from tests.run.test_resume import train
from tests.small_environment import distance, right, weather

pytestmark = [pytest.mark.numerics, pytest.mark.timing]

NAMES = ("Ada", "Bo", "Cy", "Di", "Ed", "Flo", "Gus", "Hal", "Ivy", "Jo", "Kim", "Lee", "Max", "Nan", "Oz", "Pam")


TOOLS_PY = "\n\n".join(map(inspect.getsource, (weather, distance, right)))
RECIPE = """
[run]
name = "calls"
steps = 2
threads = 1
directory = "runs"
[model]
path = "model"
device = "cpu"
[[task]]
name = "weather"
path = "questions.jsonl"
tools = ["tools.py:weather", "tools.py:distance"]
params = { reward = "tools.py:right" }
[environments]
processes = 1
[rollout]
batch_groups = 3
group_size = 2
max_new_tokens = 96
[engine]
slots = 8
max_context_tokens = 640
[eval]
every = 2
num_prompts = 2
"""


CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with recipe, tools, questions, and a tiny model that has learned to call `weather`."""
    path = tmp_path_factory.mktemp("calls")
    (path / "tools.py").write_text(TOOLS_PY)
    (path / "calls.toml").write_text(RECIPE)
    rows = [{"prompt": f"{name}: weather in Rome?", "answer": "sunny"} for name in NAMES]
    (path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown = [tool_schema(one) for one in (weather, distance)]
    template = (TEMPLATES / "qwen2_5.jinja").read_text()
    texts = [template, *(json.dumps(one) for one in shown), CALL, "sunny"] * 2
    tokenizer = trained_tokenizer(template, texts)
    bridge, end = TokenBridge(tokenizer), tokenizer.ids("<|im_end|>")
    examples = []
    for row in rows:
        call = (*tokenizer.ids(CALL), *end)
        response = (*call, *bridge.suffix(call, Message("tool", "sunny")), *tokenizer.ids("sunny"), *end)
        examples.append(Demonstration(bridge.prompt([Message("user", row["prompt"])], shown), response))
    settings = ScratchSettings(vocab_size=800, hidden_size=48, num_layers=1, num_heads=2, intermediate_size=96)
    model = scratch_model(settings, tokenizer, seed=0)
    steps = SftSettings(steps=120, lr=1e-2, batch_size=2, warmup_steps=5)
    fine_tune(model, iter(examples * 60), steps, on_step=lambda *_: None)
    model.generation_config.eos_token_id = [tokenizer.hf.eos_token_id, *end]
    model.save_pretrained(path / "model")
    tokenizer.hf.save_pretrained(path / "model")
    return path


def check_run(run: RunDirectory, model: Path) -> None:
    """Prompts are the template's own rendering with the schemas; calls were executed and the last turn was scored."""
    tokenizer = load_tokenizer(str(model))
    shown = [tool_schema(one) for one in (weather, distance)]
    exchanges, learned = [], []
    for member in [member for step in run.recorded_steps() for group in run.groups(step) for member in group.members]:
        assert member.episode is not None
        text = tokenizer.text(member.trajectory.prompt_ids, keep_special=True)
        question = text.rpartition("user\n")[2].partition("<|im_end|>")[0]
        assert question.endswith(": weather in Rome?")
        assert text == tokenizer.hf.apply_chat_template(
            [{"role": "user", "content": question}], tools=shown, add_generation_prompt=True, tokenize=False
        )
        exchanges += member.episode.exchanges
        if [one.action for one in member.episode.exchanges] == [CALL, "sunny"]:
            learned.append(member)
            assert [one.observation for one in member.episode.exchanges] == ["sunny", ""]
            assert (member.judgement.reward, member.judgement.is_correct) == (1.0, True)
            inserted = next(s for s in member.trajectory.segments if s.author is Author.ENVIRONMENT)
            assert "<tool_response>\nsunny\n</tool_response>" in tokenizer.text(inserted.token_ids)
    assert all("<|im_end|>" not in one.action for one in exchanges)
    assert learned, "the model has learned to call"


def test_a_user_trains_with_two_functions_and_five_lines(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    begin = CliRunner().invoke(app, ["train", "calls.toml"], catch_exceptions=False)
    assert begin.exit_code == 0, begin.output
    check_run(RunDirectory.open(place / "runs/calls"), place / "model")
    shown = CliRunner().invoke(app, ["show", "runs/calls", "--step", "1"], catch_exceptions=False)
    assert "tool weather" in shown.output
    assert "env/finish/stop" in (place / "runs/calls/metrics.jsonl").read_text()


def test_functions_from_python(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two train steps with tools, their reward and a test set of questions, all given as objects."""
    monkeypatch.chdir(place)
    tests = [{"prompt": "Zoe: weather in Rome?", "answer": "sunny"}]
    tree = load_recipe(Recipe, place / "calls.toml").model_dump()
    kept = ("run.threads", "model.device", "environments.processes", "engine.slots", "engine.max_context_tokens")
    config = {key: tree[key.partition(".")[0]][key.partition(".")[2]] for key in kept}
    config |= {"rollout.batch_groups": 3, "rollout.group_size": 2, "rollout.max_new_tokens": 96}
    config |= {"run.directory": str(tmp_path), "eval.every": 0}
    run = baton.train(
        "model", "questions.jsonl", right, eval_data=tests, tools=[weather, distance], steps=2, name="r", config=config
    )
    task = run.recipe.task[0]
    assert (
        task.tools
        == run.recipe.eval.task[0].tools
        == ("tests.small_environment:weather", "tests.small_environment:distance")
    )
    assert task.params == {"reward": "tests.small_environment:right"}, "the recorded recipe has the paths"
    assert {each.num_prompts for each in run.evaluations()} == {1}
    check_run(RunDirectory.open(run.path), place / "model")


def test_a_model_whose_calls_cannot_be_read_is_refused_before_anything_starts(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    tree = load_recipe(Recipe, place / "calls.toml").model_dump()
    template = (TEMPLATES / "qwen2_5.jinja").read_text().replace("tool_call>", "call>")
    trained_tokenizer(template).hf.save_pretrained(tmp_path / "model")
    for file in (place / "model").glob("*"):
        if not (tmp_path / "model" / file.name).exists():
            (tmp_path / "model" / file.name).symlink_to(file)
    places = {"run": {**tree["run"], "directory": str(tmp_path)}, "model": {"path": str(tmp_path / "model")}}
    wanted = Recipe.model_validate({**tree, **places})
    sentence = "environment 'weather': the model's chat template writes tool calls in an unsupported form"
    for begin in (lambda: footprint(wanted), lambda: train(wanted, resume=False)):
        with pytest.raises(UserError, match=sentence) as refused:
            begin()
        assert "\n" not in str(refused.value)
    assert not wanted.run.path.exists() or not any(wanted.run.path.glob("run.json"))


def test_hostile_observations_have_no_special_tokens_in_the_prompt(place: Path) -> None:
    tokenizer = load_tokenizer(str(place / "model"))
    task = TaskSettings(name="a", environment="sokoban")
    encoder, one_turn = PromptEncoder(tokenizer, [task]), PromptEncoder(tokenizer)
    special = tokenizer.hf.added_tokens_decoder

    def prompt(text: str) -> Any:
        from baton.types import Prompt

        return Prompt("1", "a", (Message("user", text),), metadata={})

    def count(ids: tuple[int, ...]) -> int:
        return sum(i in special for i in ids)

    assert encoder.ids(prompt("Push.")) == one_turn.ids(prompt("Push."))
    assert encoder.tool_format is not None
    assert one_turn.tool_format is None
    assert count(encoder.ids(prompt(SPECIAL))) == count(encoder.ids(prompt("Push.")))
    assert count(one_turn.ids(prompt(SPECIAL))) > count(one_turn.ids(prompt("Push.")))
    assert encoder.num_tokens(prompt(SPECIAL)) == len(encoder.ids(prompt(SPECIAL)))


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"tools": ["tools.py:f"]}, "tools need params.reward, the import path of a function"),
        ({"tools": ["tools.py:f"], "environment": "maze"}, "tools make an environment: remove environment"),
        ({"tools": [lambda x: x]}, "cannot be imported by another process"),
    ],
)
def test_mistakes_about_tools_are_refused(keys: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        TaskSettings.model_validate({"name": "a", **keys})

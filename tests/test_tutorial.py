"""The tutorial's files, commands and examples run in order in an empty directory, with fewer steps and prompts."""

from __future__ import annotations

import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import baton
from baton.cli.main import app
from tests.test_api_page import made_small

ROOT = Path(__file__).parents[1]
PAGES = ("tutorial-own-task.md", "tutorial-evaluate.md")
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```', re.DOTALL | re.MULTILINE)
SMALL = ["run.steps=2", "run.threads=1", "eval.num_prompts=4", "rollout.batch_groups=2", "rollout.group_size=4"]
SMALL += ["rollout.max_new_tokens=16", "engine.slots=8", "trainer.warmup_steps=0"]


def smaller(words: list[str]) -> list[str]:
    """The words of a command with less work."""
    if words[0] in ("train", "preview"):
        words = [*words, *SMALL]
    return ["4" if before == "-n" else word for before, word in zip(["", *words], words, strict=False)]


def run_shell(block: str) -> None:
    for line in block.splitlines():
        words = shlex.split(line, comments=True)
        if words[0] == "python":
            subprocess.run([sys.executable, *words[1:]], check=True, timeout=60)
        elif words[0] == "baton" and "/models/" not in line:
            done = CliRunner().invoke(app, smaller(words[1:]))
            assert done.exit_code == 0, f"{line}\n{done.output}"
            assert "could not be scored" not in done.output, line


def test_the_tutorial_runs_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(baton, "train", made_small(baton.train), raising=False)
    names: dict[str, object] = {}
    for page in PAGES:
        for language, title, text in BLOCK.findall((ROOT / "docs" / page).read_text(encoding="utf-8")):
            if title:
                Path(title).write_text(text, encoding="utf-8")
            elif language == "sh":
                run_shell(text)
            else:
                exec(compile(text, page, "exec"), names)
    assert {path.name for path in (tmp_path / "runs").glob("[a-z]*")} == {"orders", "orders-python"}
    assert (tmp_path / "exported" / "model.safetensors").is_file()
    right = importlib.import_module("trl_rewards").right
    assert right(["1<answer>5</answer>", "5", "<answer>6</answer>"], [5, 5, 5]) == [1.0, 0.0, 0.0]
    assert len((tmp_path / "responses.jsonl").read_text(encoding="utf-8").splitlines()) == 4


@pytest.mark.slow
def test_the_model_learns_the_task_of_the_second_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's own files, unchanged: accuracy rises from about 40 to 90 %, so 65 % is far from both."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    page = (ROOT / "docs" / PAGES[0]).read_text(encoding="utf-8")
    for _, title, text in BLOCK.findall(page):
        if title:
            Path(title).write_text(text, encoding="utf-8")
    subprocess.run([sys.executable, "make_data.py"], check=True, timeout=60)
    done = CliRunner().invoke(app, ["train", "orders.toml", "run.threads=1"])
    assert done.exit_code == 0, done.output
    sampled = [one for one in baton.Run("runs/orders").evaluations() if one.temperature == 1]
    assert [one.step for one in sampled] == [0, 20, 40]
    before, after = sampled[0].accuracy, sampled[-1].accuracy
    assert before is not None
    assert before.value < 0.6
    assert after is not None
    assert after.value > 0.65
    shipped = CliRunner().invoke(app, ["eval", "models/quickstart", "--recipe", "orders.toml", "-n", "8"])
    assert shipped.exit_code == 0, shipped.output


def test_the_commands_of_the_first_step_exist() -> None:
    text = (ROOT / "docs" / "tutorial-quickstart.md").read_text(encoding="utf-8")
    lines = [line for _, _, block in BLOCK.findall(text) for line in block.splitlines() if line.startswith("baton ")]
    assert len(lines) > 5
    for line in lines:
        done = CliRunner().invoke(app, [shlex.split(line)[1], "--help"])
        assert done.exit_code == 0, line

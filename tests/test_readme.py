"""The commands and settings of README and documentation: they exist, what they name exists, and the cheap ones run."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
import typer.main
from typer.testing import CliRunner

from baton.cli import main as cli
from baton.recipe.load import parse_recipe
from baton.recipe.recipe import Recipe
from baton.simulator.faults import FaultsSettings
from baton.specs.cluster import ClusterSettings

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
TEXT = README.read_text(encoding="utf-8") if README.is_file() else ""
PAGES = [ROOT / "docs" / f"{name}.md" for name in ("commands", "recipes", "lora", "evaluation", "index")]
COMMANDS = "\n".join([TEXT, *(page.read_text(encoding="utf-8") for page in PAGES)])
PLACEHOLDER = re.compile(r"^[A-Z]+$")
"""RECIPE, RUN: words that stand for the user's own."""


def fenced_lines(text: str) -> list[str]:
    """Lines of fenced shell blocks; comments taken off."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    blocks = [block for language, block in fenced if language in ("", "sh")]
    lines = [line.removeprefix("$ ") for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [words for line in lines if (words := line.partition(" #")[0].strip())]


def shell_lines(text: str = COMMANDS) -> list[str]:
    """Lines of fenced shell blocks, and the inline commands of tables and sentences; comments taken off."""
    inline = re.findall(r"`(baton [^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    return fenced_lines(text) + [words for line in inline if (words := line.partition(" #")[0].strip())]


def baton_commands(text: str = COMMANDS, lines: Callable[[str], list[str]] = shell_lines) -> list[list[str]]:
    found = []
    for line in lines(text):
        for command in re.split(r"&&|;|\|", line):
            words = shlex.split(command) if "baton " in command else []
            if words and words[0].rpartition("/")[2] == "baton":
                found.append(words[1:])
    return found


needs_readme = pytest.mark.skipif(not baton_commands(), reason="README.md has no commands yet")


def command_of(words: list[str]) -> tuple[Any, list[str]]:
    """The command, and the words after its name."""
    group = typer.main.get_command(cli.app)
    assert isinstance(group, click.Group) or hasattr(group, "commands")
    command = group.commands[words[0]]  # type: ignore[union-attr]
    if hasattr(command, "commands") and words[1:]:  # a group of commands
        return command.commands[words[1]], words[2:]
    return command, words[1:]


def check_command(words: list[str], own_files: str) -> None:
    """Check command, options and files. own_files: pattern of the files that are the user's own."""
    command, _ = command_of(words)
    options = {"--help"}.union(*([*parameter.opts, *parameter.secondary_opts] for parameter in command.params))
    for word in words[1:]:
        if word.startswith("-"):
            assert word.partition("=")[0] in options, f"baton {words[0]} has no option {word}"
        elif word.endswith(".toml") and not re.fullmatch(own_files, word):
            assert (ROOT / word).is_file(), f"{word} is not there"


@needs_readme
@pytest.mark.parametrize("words", baton_commands(), ids=" ".join)
def test_every_command_and_option_exists_and_names_files_that_do(words: list[str]) -> None:
    check_command(words, own_files="")


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_the_commands_of_a_page_exist(page: Path) -> None:
    for words in baton_commands(page.read_text(encoding="utf-8")):
        check_command(words, own_files=r"([\w.]+=)?[\w-]+\.toml|recipes/mine\.toml|.*<.*")


@pytest.mark.parametrize("page", [README, *sorted((ROOT / "docs").glob("*.md"))], ids=lambda page: page.name)
def test_the_commands_of_shell_blocks_are_complete(page: Path) -> None:
    """The parser of the command accepts them: no option or argument that is required is missing."""
    for words in baton_commands(page.read_text(encoding="utf-8"), fenced_lines):
        if "…" not in words:
            command, rest = command_of(words)
            command.make_context(" ".join(words), rest)


SETTINGS = [
    (page.name, block)
    for page in sorted((ROOT / "docs").glob("*.md"))
    for block in re.findall(r"```toml\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
]


@pytest.mark.parametrize(("page", "block"), SETTINGS, ids=[page for page, _ in SETTINGS])
def test_the_settings_of_a_page_are_valid(page: str, block: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block has sections of a recipe, or is a whole file of another kind."""
    monkeypatch.setattr("baton.records.metrics.find_spec", lambda _: True)  # wandb
    kind = {"planner.md": ClusterSettings, "simulator.md": FaultsSettings}.get(page, Recipe)
    rest = {"run": {"name": "r"}, "model": {"path": "m"}, "task": [{"name": "chain_sum"}]} if kind is Recipe else {}
    assert isinstance(parse_recipe(kind, rest | tomllib.loads(block), page), kind)


@needs_readme
@pytest.mark.parametrize(
    "words",
    [w for w in baton_commands() if w[0] in ("tasks", "keys") or "--help" in w or ("train" in w and "--dry-run" in w)],
    ids=" ".join,
)
def test_the_cheap_commands_run_as_they_stand(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    if any(PLACEHOLDER.match(word) for word in words):
        pytest.skip("a placeholder stands for the user's own")
    # a model of the user's own is not here: the shipped one takes its place
    words = ["model.path=models/quickstart" if word.startswith("model.path=") else word for word in words]
    if words[0] == "train":
        words = [*words, "eval.num_prompts=4"]  # a dry run draws them, and some take a tenth of a second each
        words += ["engine.max_context_tokens=1024", "rollout.max_new_tokens=512"]  # for which the shipped model is made
    result = CliRunner().invoke(cli.app, words)
    assert result.exit_code == 0, result.output


@pytest.mark.skipif(not TEXT, reason="there is no README.md yet")
def test_make_targets_and_linked_files_exist() -> None:
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    for target in re.findall(r"\bmake ([a-z]+)\b", "\n".join([*shell_lines(), *re.findall(r"`([^`\n]+)`", TEXT)])):
        assert target in targets, f"the Makefile has no {target}"
    for link in re.findall(r"\]\(([^)#]+)\)", TEXT):
        if "://" not in link:
            assert (ROOT / link).exists(), f"README.md links to {link}"


@pytest.mark.skipif(not TEXT, reason="there is no README.md yet")
def test_the_key_settings_that_the_readme_names_exist() -> None:
    from baton.recipe.keys import recipe_keys

    known = {f"{key.section.strip('[]')}.{key.key}" for key in recipe_keys()}
    for words in baton_commands():
        for word in words:
            key, equals, _ = word.partition("=")
            if equals and re.fullmatch(r"[a-z_]+\.[a-z_]+", key):
                assert key in known, f"there is no key {key}"

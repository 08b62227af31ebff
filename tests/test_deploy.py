"""The files under deploy/ are what their programs accept: shells, Kubernetes, and Baton's own command line."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from typer.main import get_command

from baton.cli import main as cli
from baton.recipe.load import load_recipe
from baton.recipe.recipe import Recipe

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
SCRIPTS = sorted(DEPLOY.glob("**/*.sbatch"))
MANIFESTS = sorted(DEPLOY.glob("kubernetes/*.yaml"))
KUBERNETES = "1.34"
OURS = re.compile(r'"?\$\{?baton\}?"?\s+(.*)')
"""A command of ours in a script."""


def documents() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in MANIFESTS:
        for document in yaml.safe_load_all(path.read_text()):
            yield f"{path.name}: {document['kind']}", document


def pods(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The pod templates of a document, wherever they stand in it."""
    found = [document["template"]] if "template" in document else []
    values = chain.from_iterable(value if isinstance(value, list) else [value] for value in document.values())
    return found + [pod for value in values if isinstance(value, dict) for pod in pods(value)]


def commands() -> Iterator[tuple[str, list[str]]]:
    """Every use of our command line, as (place, words)."""
    for path in SCRIPTS:
        for line in path.read_text().replace("\\\n", " ").splitlines():
            if (found := OURS.search(line)) and not line.lstrip().startswith("#"):
                yield path.name, [word.strip('"') for word in found[1].split()]
    for place, document in documents():
        if entrypoint := document.get("spec", {}).get("entrypoint"):
            yield place, entrypoint.split()[1:]
        for pod in pods(document):
            for container in pod["spec"]["containers"]:
                if container.get("args"):
                    yield place, container["args"]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_script_is_sound(path: Path) -> None:
    checked = subprocess.run(["bash", "-n", path], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
    if shutil.which("shellcheck"):
        checked = subprocess.run(["shellcheck", path], capture_output=True, text=True, check=False)
        assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize(
    ("place", "document"), list(documents()), ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_manifest_is_what_kubernetes_accepts(place: str, document: dict[str, Any]) -> None:
    if "ray.io" not in document["apiVersion"]:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
    for number, template in enumerate(pods(document)):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": f"pod-{number}"}, "spec": template["spec"]}
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)
        claimed = {mount["name"] for c in template["spec"]["containers"] for mount in c.get("volumeMounts", ())}
        assert claimed == {volume["name"] for volume in template["spec"].get("volumes", ())}, place


@pytest.mark.parametrize(
    ("place", "words"), list(commands()), ids=lambda value: value if isinstance(value, str) else ""
)
def test_every_option_and_key_that_is_used_exists(place: str, words: list[str]) -> None:
    command: Any = get_command(cli.app)
    while hasattr(command, "commands"):
        command, *words = command.commands[words[0]], *words[1:]
    known = {name for parameter in command.params for name in parameter.opts}
    used = [word for word in words if word.startswith("--")]
    assert set(used) <= known, f"{place}: {command.name} has no {set(used) - known}"
    overrides = [word for word in words if re.match(r"[a-z_]+\.[a-z_]+=", word) and "$" not in word]
    if overrides:
        load_recipe(Recipe, ROOT / "recipes" / "quickstart.toml", overrides)


def test_the_files_are_there() -> None:
    assert len(SCRIPTS) >= 2
    assert len(MANIFESTS) >= 1
    assert {words[0] for _, words in commands()} >= {"train", "worker", "token"}

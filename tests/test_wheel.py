"""The wheel alone, in an empty environment and an empty directory, runs the quickstart and what follows it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "baton", "recipes", "models")
SMALL = ["run.steps=6", "eval.num_prompts=16", "rollout.batch_groups=4", "engine.processes=1"]

NEXT = "-- the next command --"
IN_ONE_PROCESS = f"""
import json, sys
import baton
from baton.cli.main import main
for words in json.loads(sys.argv[1]):
    sys.argv = ["baton", *words]
    try:
        main()
    except SystemExit as end:
        assert not end.code, words
    print("{NEXT}", flush=True)
print(baton.Run("runs/quickstart").status)
"""
"""Runs commands one after the other in one process, because a process needs seconds to import PyTorch."""


def run(*command: object, cwd: Path, **variables: str) -> str:
    """Run a command without the variables of the tests; return what it printed."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**kept, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **variables},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy, because a build writes beside its sources."""
    pytest.importorskip("setuptools")
    copy, out = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "smollm2"))
        else:
            shutil.copy(source, copy / name)
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", out, copy, cwd=out)
    return next(out.glob("baton_rl-*.whl"))


def required(wheel: Path) -> Iterator[metadata.Distribution]:
    """The installed distributions that `pip install` of the wheel without extras would install."""
    with ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        text = archive.read(name).decode()
    todo = [line.partition(": ")[2] for line in text.splitlines() if line.startswith("Requires-Dist: ")]
    open_requirements = [(Requirement(each), "") for each in todo]
    seen = set()
    while open_requirements:
        wanted, extra = open_requirements.pop()
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": extra}):
            continue
        for chosen in ("", *wanted.extras):
            if (wanted.name.lower(), chosen) in seen:
                continue
            seen.add((wanted.name.lower(), chosen))
            found = metadata.distribution(wanted.name)
            if not chosen:
                yield found
            open_requirements += [(Requirement(each), chosen) for each in found.requires or ()]


@pytest.fixture(scope="module")
def bin_directory(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with the wheel and links to its dependencies, and with nothing else."""
    place = tmp_path_factory.mktemp("environment")
    venv.create(place, with_pip=False)
    packages = next(place.glob("lib/python*/site-packages"))
    for distribution in required(wheel):
        for entry in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (packages / entry).exists():
                (packages / entry).symlink_to(Path(str(distribution.locate_file(entry))))
    python = place / "bin" / "python"
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        wheel,
        cwd=place,
    )
    return place / "bin"


def test_the_wheel_has_the_recipes_the_quickstarts_model_and_the_licence(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        names = set(archive.namelist())
        text = archive.read(next(name for name in names if name.endswith("/METADATA"))).decode()
    shipped = {name.removeprefix("baton/recipe/shipped/") for name in names if name.startswith("baton/recipe/shipped/")}
    expected = {str(file.relative_to(ROOT)) for file in ROOT.glob("recipes/**/*.toml")}
    expected |= {str(file.relative_to(ROOT)) for file in ROOT.glob("models/quickstart/*")}
    assert shipped == expected | {"__init__.py"}
    assert any(name.endswith("dist-info/licenses/LICENSE") for name in names)
    assert "License-Expression: Apache-2.0" in text
    assert not any(name.startswith(("tests/", "benchmarks/")) for name in names)


def test_the_wheel_alone_runs_the_quickstart_in_an_empty_directory(bin_directory: Path, tmp_path: Path) -> None:
    python, baton = bin_directory / "python", bin_directory / "baton"
    find = "import importlib.util as u, baton; print(u.find_spec('reasoning_gym'), u.find_spec('peft'), baton.__file__)"
    nothing, no_peft, where = run(python, "-c", find, cwd=tmp_path).split()
    assert (nothing, no_peft) == ("None", "None")
    assert Path(where).is_relative_to(bin_directory.parent)

    run(baton, "train", "recipes/quickstart.toml", "--dry-run", cwd=tmp_path)
    assert not list(tmp_path.iterdir())
    said = run(baton, "train", "quickstart", *SMALL, cwd=tmp_path)
    assert "runs/quickstart: 6 train steps, seed 0" in said
    commands = [
        ["preview", "quickstart", "-n", "1"],
        ["eval", "runs/quickstart", "-n", "8"],
        ["report", "runs/quickstart"],
        ["export", "runs/quickstart", "model"],
        ["train", "quickstart", "model.path=model", "run.name=again", "--dry-run"],
    ]
    said = run(python, "-c", IN_ONE_PROCESS, json.dumps(commands), cwd=tmp_path)
    previewed, evaluated, reported, _, _, status = said.split(f"{NEXT}\n")
    assert "answer" in previewed
    assert "basic_arithmetic" in evaluated
    assert "training reward" in reported
    assert status.startswith("finished\n")
    assert (tmp_path / "model" / "README.md").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "runs"]

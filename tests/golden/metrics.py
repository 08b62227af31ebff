"""Names of metrics: those that a short run of each mode writes, and a hub's text for Prometheus."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import tomllib
from collections.abc import Iterable
from pathlib import Path

import tomli_w

from baton.swarm.hub.status import HubStatus, prometheus
from tests.golden.make_run import HERE as RUNS
from tests.golden.make_run import KEYS, RECIPE
from tests.golden.wire import CANONICAL

FILE = Path(__file__).parent / "metrics.toml"
PROMETHEUS = Path(__file__).parent / "prometheus.txt"
BASE = 'rollout.mode="sync"', "run.steps=2", "rollout.batch_groups=2", "rollout.overprovision=1.0"
QUICK = {
    "sync": BASE,
    "partial": ("run.steps=2",),
    "colocated": (*BASE, 'rollout.placement="colocated"'),
    "ppo with a reference": (*BASE, "algorithm=ppo", "algorithm.kl_coef=0.1", "algorithm.num_minibatches=2"),
    "lora": (*BASE, "lora.rank=2"),
}
"""Runs in this process, as overrides of the golden run's recipe."""
SLOW = {
    "async": ("run.steps=2",),
    "swarm": ("run.steps=2", "engine.processes=0", "swarm.workers=1"),
}
"""Runs that start processes."""
SOMETIMES = re.compile(
    r"staleness/length_q[1-4]|prompts/too_long|judge/(?!failed)\w+|kl/clamped_frac|policy/mismatch_kl"
    r"|policy/logprob_diff_(mean|max)|perf/slot_(occupancy|seconds)"
    r"|swarm/(broadcast_s|trajectories_per_s|needed_trajectories_per_s|slack_s|version_density)"
)
"""Those whose presence depends on what happens in a run."""
HEARTBEATS = {"perf/generate_tokens_per_s", "perf/occupancy"}
"""In a swarm a step has these only if a worker's heartbeat came in it, and two short steps may end before the first."""


def recipe_of(name: str, directory: Path) -> tuple[Path, tuple[str, ...]]:
    """Copy the golden model into a directory and write the recipe; return it with the overrides of a run."""
    shutil.copytree(RUNS / "model", directory / "model", dirs_exist_ok=True)
    file = directory / "recipe.toml"
    mode = "async" if name in SLOW else "partial"
    file.write_text(RECIPE.format(mode=mode, **KEYS[mode]))
    return file, (QUICK | SLOW)[name]


def names_of(name: str, directory: Path) -> set[str]:
    """Train, in a directory that is the working directory; return the names of the metrics."""
    from baton.console import Console
    from baton.recipe.load import load_recipe
    from baton.recipe.recipe import Recipe
    from baton.records.metrics import read_metrics
    from baton.run.assemble import build_loop
    from baton.views.terminal.progress import TerminalObserver

    file, overrides = recipe_of(name, directory)
    recipe = load_recipe(Recipe, file, overrides)
    loop = build_loop(recipe, TerminalObserver(Console(quiet=True), 2), resume=False, overwrite=True)
    try:
        loop.train()
    finally:
        loop.close()
    return {key for row in read_metrics(recipe.run.path) for key in row}


def steady(name: str, found: Iterable[str]) -> list[str]:
    """Return, sorted, those of a mode's metrics that every run of it writes."""
    sometimes = HEARTBEATS if name == "swarm" else set()
    return sorted(each for each in found if each not in sometimes and not SOMETIMES.fullmatch(each))


def status_text() -> str:
    """Return a hub's text for Prometheus, of a status that has everything."""
    return prometheus(CANONICAL.make(HubStatus, 0, False))


def make(names: Iterable[str] = (*QUICK, *SLOW)) -> None:
    """Write the golden files; of modes that are not named, what was there stays."""
    found = tomllib.loads(FILE.read_text()) if FILE.exists() else {}
    for name in names:
        with tempfile.TemporaryDirectory() as path:
            os.chdir(path)
            found[name] = steady(name, names_of(name, Path(path)))
            os.chdir("/")
    FILE.write_text(tomli_w.dumps({name: found[name] for name in (*QUICK, *SLOW) if name in found}))
    PROMETHEUS.write_text(status_text())


if __name__ == "__main__":
    make()

"""Makes the run directories in `tests/golden/run`: see README.md beside this file."""

from __future__ import annotations

import json
import os
import re
import shutil
import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent / "run"
MODES = ("partial", "async")
RECIPE = """\
[run]
name = "{mode}"
directory = "runs"
steps = 4
seed = 5
threads = 1

[model]
path = "model"
device = "cpu"

[[task]]
name = "chain_sum"
form = "compact"
params = {{ min_terms = 2, max_terms = 3, max_digits = 1 }}

[answer]
format = "last_line"
instruct = false

[[reward]]
kind = "function"
function = "tests.small_reward:evenness"
isolate = false

[[reward]]
kind = "correct"
weight = 0.5

[rollout]
mode = "{mode}"
batch_groups = 2
group_size = 3
max_new_tokens = 32
stop = ["a", "e", "i", "o", "u", "A", "E", "I", "O", "U"]   # of a random model: short and long responses
{rollout}

[engine]
{engine}
slots = 8
max_context_tokens = 64
report_every_tokens = 4

[trainer]
lr = 1e-3

[eval]
every = 2
num_prompts = 3
samples = 2

[checkpoint]
every = 2
keep = 1
"""
KEYS = {
    "partial": {"engine": "", "rollout": "overprovision = 2.0"},
    "async": {"engine": "processes = 1", "rollout": "max_staleness = 2"},
}
NOT_KEPT = ("tensorboard", "lock", "holder.json", "report.json")
"""They name the machine, or are made anew by whoever opens the run."""


KINDS = {"batch", "consumed", "finished", "group", "judged", "last_step", "place", "segments"}
"""Of records that a journal must have, so that a resume reads each of them."""


class Died(Exception):
    """What a kill in the middle of the third train step is here."""


def make_model(path: Path) -> None:
    """Write a random model of one layer of 8 units."""
    from baton.policy.new_model import scratch_model, scratch_tokenizer
    from baton.policy.settings import ScratchSettings

    tokenizer = scratch_tokenizer(["1+2-3"], 265)
    settings = ScratchSettings(
        vocab_size=300, hidden_size=8, num_layers=1, num_heads=2, num_kv_heads=2, intermediate_size=16
    )
    scratch_model(settings, tokenizer, seed=0).save_pretrained(path)
    tokenizer.hf.save_pretrained(path)


def make_run(mode: str) -> None:
    """Train two steps, and die in the third, whose batch is recorded: no checkpoint contains it."""
    from baton.console import Console
    from baton.recipe.load import load_recipe
    from baton.recipe.recipe import Recipe
    from baton.run.assemble import build_loop
    from baton.views.terminal.progress import TerminalObserver

    file = Path(f"{mode}.toml")
    file.write_text(re.sub(r"\n\n+", "\n\n", RECIPE.format(mode=mode, **KEYS[mode])))
    sys.argv = ["baton", "train", file.name]
    recipe = load_recipe(Recipe, file)
    with open(os.devnull, "w") as nowhere, TerminalObserver(Console(file=nowhere), recipe.run.steps) as observer:  # noqa: PTH123
        loop = build_loop(recipe, observer, resume=False, overwrite=True)
        train_step = loop.trainer.step

        def step(batch: Any) -> dict[str, float]:
            if batch.step == 3:
                raise Died
            return train_step(batch)

        loop.trainer.step = step  # type: ignore[method-assign]
        try:
            loop.train()
        except Died:
            pass
        finally:
            loop.close()
    clean(Path("runs") / mode)


def kinds_of(journal: Path) -> set[str]:
    """Return the kinds of records in a journal that nobody has open."""
    with closing(sqlite3.connect(f"file:{journal}?immutable=1", uri=True)) as database:
        return {kind for (kind,) in database.execute("SELECT kind FROM entries")}


def clean(run: Path) -> None:
    """Take out what names this machine."""
    for name in NOT_KEPT:
        path = run / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    facts = json.loads((run / "run.json").read_text())
    facts |= {"platform": "Linux", "processor": "a processor", "cores": 2}
    (run / "run.json").write_text(json.dumps(facts, indent=2) + "\n")


def make() -> None:
    """Make all anew."""
    shutil.rmtree(HERE, ignore_errors=True)
    HERE.mkdir()
    os.chdir(HERE)
    make_model(Path("model"))
    for mode in MODES:
        make_run(mode)
        while kinds_of(Path("runs") / mode / "journal.sqlite") != KINDS:  # what is unfinished is a matter of timing
            make_run(mode)


if __name__ == "__main__":
    make()

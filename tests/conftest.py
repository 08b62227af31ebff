"""One torch thread per process, set before torch is imported: several test processes share the cores."""

import os
import tempfile

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# code that torch.compile has cached for another instruction set ends the process
os.environ.setdefault(
    "TORCHINDUCTOR_CACHE_DIR",
    f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}_{os.environ.get('ATEN_CPU_CAPABILITY', 'all')}",
)

from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import Phase, settings

from tests import fork_server  # noqa: F401  replaces a function of Baton, so it is imported before Baton

# no test asserts a time, however busy the machine is; CI draws the same cases in each run, so that a rare failure does
# not block a change that has not caused it
settings.register_profile("unhurried", deadline=None, derandomize="CI" in os.environ)
settings.register_profile(
    "mutants",
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=30,
    phases=[Phase.explicit, Phase.generate],  # that a test fails is enough; nobody reads the smallest example
)
settings.load_profile("unhurried")

RECIPE = """
[run]
name = "small"
directory = "{directory}"
steps = 3
seed = 5
threads = 1

[model]
path = "{model}"
device = "cpu"

[[task]]
name = "chain_sum"
form = "compact"
params = {{ min_terms = 2, max_terms = 3, max_digits = 1 }}

[[task]]
name = "basic_arithmetic"
form = "compact"
params = {{ max_terms = 3, max_digits = 1 }}

[answer]
format = "last_line"
instruct = false

[[reward]]
kind = "function"
function = "tests.small_reward:evenness"

[[reward]]
kind = "correct"
weight = 0.5

[rollout]
batch_groups = 4
group_size = 4
max_new_tokens = 10

[engine]
slots = 16
max_context_tokens = 64

[trainer]
lr = 1e-3

[eval]
every = 2
num_prompts = 6
samples = 2

[checkpoint]
every = 2
"""


@dataclass(frozen=True)
class Small:
    """A random two-layer model on disk, a recipe file that trains it, and where its finished run of 3 steps lies."""

    model: Path
    recipe: Path
    run: Path


def write_recipe(path: Path, model: Path, directory: Path) -> Path:
    """Write the small recipe for a model and a directory of runs."""
    path.write_text(RECIPE.format(model=model, directory=directory))
    return path


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    """One small run that many tests only look at."""
    import msgspec

    from baton.console import Console
    from baton.policy.new_model import scratch_model, scratch_tokenizer
    from baton.policy.settings import ScratchSettings
    from baton.recipe.load import load_recipe
    from baton.recipe.recipe import Recipe
    from baton.run.assemble import build_loop
    from baton.run.summary import summarise
    from baton.views.terminal.progress import TerminalObserver

    root = tmp_path_factory.mktemp("small")
    model = root / "model"
    tokenizer = scratch_tokenizer(["1+2-3 <think>1+2=3</think><answer>0</answer>"], 300)
    settings = ScratchSettings(vocab_size=300, hidden_size=32, num_layers=2, num_heads=2, intermediate_size=64)
    scratch_model(settings, tokenizer, seed=0).save_pretrained(model)
    tokenizer.hf.save_pretrained(model)
    recipe_path = write_recipe(root / "small.toml", model, root / "runs")
    recipe = load_recipe(Recipe, recipe_path)
    observer = TerminalObserver(Console(quiet=True), recipe.run.steps)
    loop = build_loop(recipe, observer, resume=False, overwrite=False)
    loop.train()
    loop.close()
    loop.run.write_report(msgspec.to_builtins(summarise(loop.run)))
    return Small(model, recipe_path, recipe.run.path)

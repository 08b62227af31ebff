"""Each architecture that support.toml lists as tested trains two steps: tiny random models, the embedded engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from baton.console import Console
from baton.errors import UserError
from baton.policy.load import load_model
from baton.policy.new_model import scratch_tokenizer
from baton.recipe.load import load_recipe
from baton.recipe.recipe import Recipe
from baton.recipe.support import support_table
from baton.records.metrics import read_metrics
from baton.rollout.engines.embedded.network import Network
from baton.run.assemble import build_loop
from baton.trainer.checkpoint import list_checkpoints
from baton.views.terminal.progress import TerminalObserver
from tests.conftest import write_recipe
from tests.model_families import tiny_config

pytestmark = pytest.mark.numerics

FAMILIES = next(entry for entry in support_table().support if entry.test and "architecture" in entry.when)
FAST = ("llama", "qwen3_moe", "gpt2")
"""One with grouped queries, one with experts, one with learned positions."""


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in FAMILIES.when["architecture"]],
)
def test_a_family_trains_two_steps(family: str, tmp_path: Path) -> None:
    """Engine and trainer agree on every token's log-probability, and the second step's under new weights too."""
    torch.manual_seed(0)
    tokenizer = scratch_tokenizer(["1+2-3 <think>1+2=3</think><answer>0</answer>"], 300)
    AutoModelForCausalLM.from_config(tiny_config(family)).save_pretrained(tmp_path / "model")
    tokenizer.hf.save_pretrained(tmp_path / "model")
    small = ["run.steps=2", "eval.every=99", "eval.num_prompts=2", "eval.samples=1", "checkpoint.every=2"]
    recipe = load_recipe(Recipe, write_recipe(tmp_path / "small.toml", tmp_path / "model", tmp_path), small)
    loop = build_loop(recipe, TerminalObserver(Console(quiet=True), 2), resume=False, overwrite=False)
    try:
        loop.train()
    finally:
        loop.close()
    rows = [row for row in read_metrics(recipe.run.path) if "policy/logprob_diff_max" in row]
    assert len(rows) == 2
    assert max(row["policy/logprob_diff_max"] for row in rows) < 1e-4
    assert max(row["policy/grad_norm"] for row in rows) > 0
    saved = list_checkpoints(recipe.run.path / "checkpoints")[-1]
    before, after = (
        load_model(str(path), dtype=torch.float32, device=torch.device("cpu")).state_dict()
        for path in (tmp_path / "model", saved)
    )
    assert any(not torch.equal(tensor, after[name]) for name, tensor in before.items())


@pytest.mark.parametrize("family", ["bloom", "gpt_neo", "lfm2", "llama4_text", "mamba", "qwen3_next", "xglm"])
def test_what_the_table_refuses_the_engine_cannot_drive(family: str) -> None:
    refused = {name for e in support_table().support if e.refused for name in e.when.get("architecture", ())}
    assert family in refused
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(family)).eval()
    with pytest.raises(UserError, match="embedded engine"):
        Network(model, 8, 64)

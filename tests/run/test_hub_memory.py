"""The memory law counts what the hub of a swarm holds while it publishes a version."""

from __future__ import annotations

import pytest

from baton.clock import CODERS
from baton.recipe.recipe import Recipe
from baton.run.memory import processes_of
from baton.specs.model import model_spec


def recipe(**changes: object) -> Recipe:
    return Recipe.model_validate(
        {"run": {"name": "r"}, "model": {"path": "x"}, "task": [{"name": "chain_sum"}], **changes}
    )


@pytest.mark.parametrize("hidden", [32, 4096])
def test_a_hub_holds_five_copies_of_a_version_and_one_part_for_each_thread(hidden):
    shape = {"num_hidden_layers": 2, "hidden_size": hidden, "vocab_size": 64, "num_attention_heads": 2}
    model = model_spec({**shape, "intermediate_size": 64, "num_key_value_heads": 1}, "qwen3")
    swarm = recipe(swarm={"workers": 2}, weights={"dtype": "bfloat16"})
    (hub,) = [process for process in processes_of(swarm, model, on_cpu=True) if process.name == "the hub"]
    version = 2 * model.params
    assert hub.num_bytes == pytest.approx(5 * version + min(CODERS * 80 * 2**20, 10 * version), rel=1e-6)
    assert "the hub" not in [process.name for process in processes_of(recipe(), model, on_cpu=True)]

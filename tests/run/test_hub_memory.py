"""The memory law counts what the hub of a swarm holds while it publishes a version."""

from __future__ import annotations

import pytest

from baton.clock import CODERS
from baton.recipe.recipe import Recipe
from baton.run.memory import ProcessMemory, processes_of
from baton.specs.model import ModelSpec, model_spec

SHAPE = {"num_hidden_layers": 2, "vocab_size": 64, "num_attention_heads": 2, "intermediate_size": 64}


def recipe(**changes: object) -> Recipe:
    return Recipe.model_validate(
        {"run": {"name": "r"}, "model": {"path": "x"}, "task": [{"name": "chain_sum"}], **changes}
    )


def model_of(hidden: int) -> ModelSpec:
    return model_spec({**SHAPE, "hidden_size": hidden, "num_key_value_heads": 1}, "qwen3")


def hub_of(model: ModelSpec, **changes: object) -> ProcessMemory:
    own = recipe(**{"swarm": {"workers": 2}, "weights": {"dtype": "bfloat16"}, **changes})
    (hub,) = [process for process in processes_of(own, model, on_cpu=True) if process.name == "the hub"]
    return hub


@pytest.mark.parametrize("hidden", [32, 4096])
def test_a_hub_holds_one_part_for_each_thread_because_versions_are_mapped_files(hidden: int) -> None:
    model = model_of(hidden)
    assert hub_of(model).num_bytes == pytest.approx(min((CODERS + 1) * 80 * 2**20, 20 * model.params), rel=1e-6)
    assert "the hub" not in [process.name for process in processes_of(recipe(), model, on_cpu=True)]


def test_files_in_memory_are_counted() -> None:
    model = model_of(4096)
    files = {"dtype": "bfloat16", "files": "/dev/shm"}
    kept = recipe(swarm={"workers": 2}).num_fetchable_versions
    assert hub_of(model, weights=files).num_bytes - hub_of(model).num_bytes == pytest.approx(
        (3 + kept) * 2 * model.params
    )


def test_a_hub_with_adapters_also_reads_the_largest_tensor_of_the_base() -> None:
    model = model_of(4096)
    parts = {part.name: part.num_bytes for part in hub_of(model, lora={"rank": 2}).parts}
    assert parts["largest tensor of the base weights"] == 4 * 64 * 4096
    assert parts["parts that are coded"] == min((CODERS + 1) * 80 * 2**20, 40 * model.params)


def test_a_hub_that_checks_workers_holds_an_engines_weights() -> None:
    model = model_of(4096)
    checked = hub_of(model, swarm={"serve": "127.0.0.1:0"}, engine={"dtype": "float32"})
    assert {part.name: part.num_bytes for part in checked.parts}["verification: weights"] == 4 * model.params


def test_a_trainer_that_publishes_to_other_processes_holds_no_copy() -> None:
    model = model_of(4096)
    for changes in ({"swarm": {"workers": 1}}, {"engine": {"processes": 1}}):
        (trainer,) = [p for p in processes_of(recipe(**changes), model, on_cpu=True) if p.name == "the trainer"]
        assert trainer.phase != "publication"


def test_a_trainer_keeps_the_version_that_a_late_replica_still_receives() -> None:
    """Two bytes for each parameter. Ranks gather one bucket at a time and keep nothing."""
    model = model_of(4096)

    def trainer(replicas: int, **changes: object) -> ProcessMemory:
        engine = {"kind": "vllm", "dtype": "bfloat16", "vllm": {"replicas": replicas}}
        own = recipe(engine=engine, weights={"transport": "direct"}, **changes)
        return next(p for p in processes_of(own, model, on_cpu=True) if p.name.endswith(("trainer", "trainer ranks")))

    one, many = ({part.name: part.num_bytes for part in trainer(count).parts} for count in (1, 3))
    assert "previous version" not in one
    assert many["previous version"] == 2 * model.params
    assert trainer(3, trainer={"ranks": 2}).parts == trainer(1, trainer={"ranks": 2}).parts

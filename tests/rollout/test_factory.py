"""Which engine is built, by a recipe and by a worker that chooses for itself."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from baton.errors import UserError
from baton.policy.load import save_skeleton
from baton.rollout.engine import EngineSettings
from baton.rollout.engines.embedded.engine import EmbeddedEngine
from baton.rollout.engines.factory import chosen, engine_from_skeleton


def test_a_worker_takes_another_kind_slots_and_keys_of_its_own_and_the_rest_from_the_recipe():
    recipe = EngineSettings(processes=2, max_context_tokens=99, dtype="bfloat16")
    found = chosen(recipe, kind="vllm", slots=16, options=["tensor_parallel=2", "enforce_eager=true"])
    assert (found.kind, found.slots, found.max_context_tokens, found.dtype) == ("vllm", 16, 99, "bfloat16")
    assert (found.vllm.tensor_parallel, found.vllm.enforce_eager) == (2, True)
    assert found.processes == 0, "an engine with processes of its own is one"
    assert chosen(recipe) == recipe


@pytest.mark.parametrize(
    ("kind", "options", "sentence"),
    [
        ("tgi", [], "--engine: got 'tgi', allowed are embedded, vllm, sglang"),
        ("vllm", ["tensor_parallel"], "got 'tensor_parallel', allowed is key=value with one of the keys tensor_par"),
        ("vllm", ["tensors=2"], "got 'tensors=2'"),
        ("vllm", ["tensor_parallel=no"], "engine.vllm.tensor_parallel: got 'no'"),
        ("vllm", ["tensor_parallel=0"], "engine.vllm.tensor_parallel: got '0'"),
        ("embedded", ["slots=8"], "allowed is nothing: embedded has no options"),
    ],
)
def test_what_a_worker_cannot_have_is_said_in_a_sentence(kind, options, sentence):
    with pytest.raises(UserError, match=sentence):
        chosen(EngineSettings(), kind=kind, options=options)


@pytest.mark.parametrize("fault", [{"processes": 2}, {"report_routing": True}])
def test_what_only_the_embedded_engine_has_is_refused_for_others(fault):
    EngineSettings(**fault)
    with pytest.raises(ValidationError, match=next(iter(fault))):
        EngineSettings(kind="vllm", **fault)


def test_a_skeleton_becomes_the_kind_that_is_asked_for(load, tokenizer, tmp_path):
    tokenizer.hf.chat_template = "{{ messages[0]['content'] }}"
    save_skeleton(load("llama"), tokenizer, tmp_path)
    settings = EngineSettings(slots=8, max_context_tokens=32)
    engine = engine_from_skeleton(tmp_path, None, settings, device="cpu", attention="sdpa")
    assert isinstance(engine, EmbeddedEngine)
    assert engine.version.number == -1

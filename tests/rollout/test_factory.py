"""Which engine is built, by a recipe and by a worker that chooses for itself."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from baton.errors import UserError
from baton.policy.load import save_skeleton
from baton.rollout.engine import EngineSettings
from baton.rollout.engines.embedded.engine import EmbeddedEngine
from baton.rollout.engines.factory import check_source, chosen, engine_from_skeleton


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


@pytest.mark.parametrize(("kind", "fault"), [("vllm", {"processes": 2}), ("sglang", {"report_routing": True})])
def test_what_an_engine_does_not_have_is_refused_for_its_kind(kind, fault):
    EngineSettings(**fault)
    with pytest.raises(ValidationError, match=next(iter(fault))):
        EngineSettings(kind=kind, **fault)


def test_a_skeleton_becomes_the_kind_that_is_asked_for(load, tokenizer, tmp_path):
    tokenizer.hf.chat_template = "{{ messages[0]['content'] }}"
    save_skeleton(load("llama"), tokenizer, tmp_path)
    settings = EngineSettings(slots=8, max_context_tokens=32)
    engine = engine_from_skeleton(tmp_path, None, settings, device="cpu", attention="sdpa")
    assert isinstance(engine, EmbeddedEngine)
    assert engine.version.number == -1


@pytest.mark.parametrize("name", ["max_num_seqs", "worker_extension_cls", "load_format", "logprobs_mode"])
def test_arguments_of_vllm_that_baton_sets_are_refused(name):
    with pytest.raises(
        ValidationError, match=rf"{name}: Baton sets this argument of vLLM; (use engine\.slots|remove it)"
    ):
        EngineSettings(kind="vllm", vllm={"arguments": {name: 1}})


def test_the_additional_configuration_of_vllm_is_a_table():
    with pytest.raises(ValidationError, match=r"additional_config: got 'x', allowed is a table"):
        EngineSettings(kind="vllm", vllm={"arguments": {"additional_config": "x"}})


def test_a_worker_takes_arguments_of_vllm_only_from_its_own_user():
    given = EngineSettings(kind="vllm", vllm={"arguments": {"trust_remote_code": True}})
    with pytest.raises(UserError, match=r"engine\.vllm\.arguments: got trust_remote_code from the hub"):
        check_source(given, own=["tensor_parallel"])
    check_source(given, own=["arguments"])
    check_source(EngineSettings(vllm=given.vllm), own=[])  # another kind of engine does not read them
    own = chosen(EngineSettings(), kind="vllm", options=['arguments={"max_num_batched_tokens": 64}'])
    assert own.vllm.arguments == {"max_num_batched_tokens": 64}
    with pytest.raises(UserError, match=r"engine\.vllm\.arguments: got 'no table'"):
        chosen(EngineSettings(), kind="vllm", options=["arguments=no table"])

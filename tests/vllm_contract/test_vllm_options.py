"""Options of [engine.vllm] on a real vLLM: vLLM's own LoRA, logging levels, further arguments, several devices."""

from __future__ import annotations

import pytest
import torch
from engine_contract import PROMPT
from safetensors.torch import save_file
from test_vllm_exact import assert_logprobs_are_those_of

from baton.errors import EngineFault, UserError
from baton.policy.adapters import BaseWeights
from baton.policy.load import save_skeleton
from baton.policy.settings import ModelSettings
from baton.policy.tensors import policy_tensors
from baton.rollout.engine import EngineSettings
from baton.rollout.engines.factory import engine_from_skeleton, engine_of_model
from baton.rollout.engines.whole_weights import WholeWeights
from baton.types import PolicyVersion

SHAPE = {"slots": 8, "max_context_tokens": 512, "dtype": "float32"}


def settings(**own: object) -> EngineSettings:
    return EngineSettings(kind="vllm", vllm={"enforce_eager": True, "answer_timeout_s": 60, **own}, **SHAPE)


def adapter(seed: int, rank: int = 4) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for layer in range(2):
        for module, (rows, columns) in {"mlp.up_proj": (256, 192), "self_attn.o_proj": (192, 192)}.items():
            name = f"model.layers.{layer}.{module}"
            found[f"{name}.lora_A.weight"] = torch.randn(rank, columns, generator=generator)
            found[f"{name}.lora_B.weight"] = torch.randn(rows, rank, generator=generator) * 0.05
    return found


def merged(load, tensors):
    model = load("qwen3")
    base = policy_tensors(model)
    whole = {**base, **dict(BaseWeights().merged(base, tensors))}
    model.load_state_dict(whole, strict=False)
    return model


def test_vllms_own_lora_serves_the_adapter_that_was_sent_last_also_in_flight(load, tokenizer, driver, tmp_path):
    """Built from a skeleton with random weights: the base and the adapter arrive separately."""
    tokenizer.hf.chat_template = "{{ messages[0]['content'] }}"
    save_skeleton(load("qwen3"), tokenizer, tmp_path)
    base = policy_tensors(load("qwen3"))
    engine = engine_from_skeleton(tmp_path, base, settings(lora_rank=4), device="cpu", attention="sdpa")
    try:
        for number in (1, 2):
            tensors = adapter(number)
            engine.load_weights(tensors, PolicyVersion("run", number))
            lease = driver.lease(number, PROMPT, 24, version=number, temperature=0.0)
            grown = driver.run(engine, [lease])[number]
            model = merged(load, tensors)
            assert_logprobs_are_those_of(model, PROMPT, grown)
        lease = driver.lease(7, PROMPT, 300, version=2, temperature=0.0, is_exact=False)
        engine.submit(lease)
        reports = driver.grow(engine, 20)
        engine.load_weights(adapter(3), PolicyVersion("run", 3))
        while not any(report.finish_reason for report in reports):
            reports += engine.step()
        trajectory = lease.trajectory
        for report in reports:
            trajectory = trajectory.extended(report.segments, report.finish_reason)
        assert [segment.policy_version for segment in trajectory.segments] == [2, 3]
        with pytest.raises(EngineFault, match=r"a new adapter does not fit: model\.layers\.9"):
            engine.load_weights(
                {n.replace("layers.1", "layers.9"): t for n, t in adapter(4).items()}, PolicyVersion("run", 4)
            )
        assert engine.version.number == 3
        engine.load_weights(policy_tensors(load("qwen3_next")), PolicyVersion("run", 5))
        grown = driver.run(engine, [driver.lease(9, PROMPT, 24, version=5, temperature=0.0)])[9]
        assert_logprobs_are_those_of(load("qwen3_next"), PROMPT, grown)  # a whole model removes the adapter
    finally:
        engine.close()


def test_layers_that_a_load_misses_are_found_although_vllm_logs_only_errors(
    vllm_paths, load, driver, monkeypatch, tmp_path
):
    """Also with further arguments of vLLM."""
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    given = settings(arguments={"max_num_batched_tokens": 64, "seed": 3})
    engine = engine_of_model(ModelSettings(path=vllm_paths["qwen3"], device="cpu"), given, PolicyVersion("run", 0))
    try:
        engine.load_weights(policy_tensors(load("qwen3_next")), PolicyVersion("run", 1))
        grown = driver.run(engine, [driver.lease(0, [*PROMPT] * 30, 24, version=1, temperature=0.0)])[0]
        assert_logprobs_are_those_of(load("qwen3_next"), [*PROMPT] * 30, grown)
        tensors = WholeWeights(load("qwen3"), None).whole(policy_tensors(load("qwen3")))
        incomplete = {name: t for name, t in tensors.items() if "layers.1.mlp.down_proj" not in name}
        save_file(incomplete, tmp_path / "file")
        with pytest.raises(EngineFault, match="did not update the weights of the layers RowParallelLinear"):
            engine.client.load(str(tmp_path / "file"), "incomplete")
    finally:
        engine.close()


def test_an_argument_that_vllm_does_not_have_is_a_sentence(vllm_paths):
    given = settings(arguments={"no_such_argument": 1})
    with pytest.raises(UserError, match=r"vLLM refuses this model or these settings: .*no_such_argument"):
        engine_of_model(ModelSettings(path=vllm_paths["qwen3"], device="cpu"), given, PolicyVersion("run", 0))


def test_batch_invariant_kernels_are_refused_on_a_cpu(vllm_paths):
    """vLLM itself would start and fail at the first token, because the kernels are Triton's."""
    given = settings(batch_invariant=True)
    with pytest.raises(UserError, match=r"engine\.vllm\.batch_invariant: got true, but this vLLM is built for a CPU"):
        engine_of_model(ModelSettings(path=vllm_paths["qwen3"], device="cpu"), given, PolicyVersion("run", 0))

"""The names of vLLM's sampling masks that Baton uses exist, and a vLLM without Model Runner V2 refuses them."""

from __future__ import annotations

import dataclasses

import pytest

from baton.errors import UserError
from baton.policy.settings import ModelSettings
from baton.rollout.engine import EngineSettings
from baton.rollout.engines.factory import engine_of_model
from baton.types import PolicyVersion

SHAPE = {"slots": 8, "max_context_tokens": 128}


def test_vllm_has_the_fields_that_the_client_reads() -> None:
    from vllm import AsyncEngineArgs
    from vllm.outputs import CompletionOutput, SamplingMask

    assert "return_sampling_mask" in {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    assert "sampling_mask" in {field.name for field in dataclasses.fields(CompletionOutput)}
    assert SamplingMask([[3, 4]]).token_ids == [[3, 4]]


def test_vllm_without_model_runner_v2_refuses_to_return_experts(vllm_paths) -> None:
    from vllm.triton_utils import HAS_TRITON

    if HAS_TRITON:
        pytest.skip("this vLLM has Model Runner V2")
    settings = EngineSettings(kind="vllm", report_routing=True, vllm={"enforce_eager": True}, **SHAPE)
    with pytest.raises(UserError, match=r"vLLM refuses .* requires Model Runner V2"):
        engine_of_model(ModelSettings(path=vllm_paths["qwen3"], device="cpu"), settings, PolicyVersion("run", 0))


def test_a_vllm_without_model_runner_v2_refuses_to_start(vllm_paths) -> None:
    from vllm.triton_utils import HAS_TRITON

    if HAS_TRITON:
        pytest.skip("this vLLM has Model Runner V2")
    keys = {"enforce_eager": True, "return_sampling_mask": True}
    settings = EngineSettings(kind="vllm", vllm=keys, **SHAPE)
    with pytest.raises(UserError, match=r"vLLM refuses .* sampling distribution replay requires Model Runner V2"):
        engine_of_model(ModelSettings(path=vllm_paths["qwen3"], device="cpu"), settings, PolicyVersion("run", 0))

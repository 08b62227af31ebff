"""The experts that vLLM returns with the last message of a request become the routing of every token, through a fake of
the fields that the client reads: what vLLM 0.32's source says, no more."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from test_vllm_reported_masks import FakeLlm, llm, segments
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from baton.errors import EngineFault, UserError
from baton.policy.routing import RoutingReplay
from baton.recipe.recipe import Recipe
from baton.rollout.engine import EngineSettings
from baton.rollout.engines.vllm.client import VllmClient
from baton.rollout.engines.vllm.engine import VllmEngine
from baton.types import Lease, PolicyVersion, SamplingParams, Trajectory

__all__ = ["llm"]
PROMPT = (2, 3, 5)
NEW = 5
CONFIG = Qwen3MoeConfig(
    vocab_size=64, hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=4,
    num_attention_heads=2, num_key_value_heads=1, head_dim=16, num_experts=6, num_experts_per_tok=2,
    mlp_only_layers=[1], decoder_sparse_step=1,
)  # fmt: skip


def as_vllm_returns(model: Any, token_ids: list[int]) -> tuple[Any, list[bytes]]:
    """[T, layers, experts per token], with zeros for the layer without experts; and what the embedded engine reports
    for the same tokens."""
    replay = RoutingReplay(model)
    with torch.no_grad(), replay.recorded() as routing:
        model(torch.tensor([[*PROMPT, *token_ids]]), use_cache=False)
    places = slice(len(PROMPT) - 1, len(PROMPT) - 1 + len(token_ids))
    experts = np.zeros((len(token_ids), CONFIG.num_hidden_layers, 2), np.uint8)
    for layer, chosen in zip((0, 2, 3), routing.values(), strict=True):
        experts[:, layer] = chosen[places].numpy()
    return experts, replay.as_bytes(routing)[places]


@pytest.fixture
def engine(llm: FakeLlm):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG)
    settings = EngineSettings(kind="vllm", slots=8, max_context_tokens=32, report_routing=True, report_every_tokens=2)
    skeleton: Any = type("Skeleton", (), {"model": model, "end_ids": (1,), "text": str})
    client = VllmClient({}, answer_timeout_s=30.0, reports_routing=True)
    made = VllmEngine(client, skeleton, None, settings, PolicyVersion("r", 0))
    llm.masks = None
    yield made
    made.close()


def lease(*, is_exact: bool = True) -> Lease:
    return Lease(0, Trajectory(0, 0, PROMPT), SamplingParams(NEW), 5, 0, is_exact)


def test_experts_of_a_response_are_those_that_the_embedded_engine_reports(engine: VllmEngine, llm: FakeLlm) -> None:
    torch.manual_seed(0)
    llm.experts, expected = as_vllm_returns(AutoModelForCausalLM.from_config(CONFIG).eval(), [10, 11, 12, 13, 14])
    engine.submit(lease())
    whole = Trajectory(0, 0, PROMPT).extended(tuple(segments(engine)))
    assert whole.token_ids == [10, 11, 12, 13, 14]
    assert whole.routing == expected
    assert [asked.routed_experts_prompt_start for asked in llm.asked] == [len(PROMPT) - 1]


@pytest.mark.parametrize("shape", [None, (NEW - 1, 4, 2), (NEW, 3, 2), (NEW, 4, 3), (NEW, 4)])
def test_experts_of_another_shape_are_an_error(engine: VllmEngine, llm: FakeLlm, shape: Any) -> None:
    llm.experts = None if shape is None else np.zeros(shape, np.uint8)
    engine.submit(lease())
    with pytest.raises(EngineFault, match=r"vLLM returned experts of shape .* for 5 tokens of a model with 3 routers"):
        segments(engine)


def test_a_response_of_several_versions_is_refused(engine: VllmEngine) -> None:
    with pytest.raises(UserError, match=r'report_routing requires rollout\.mode = "sync"'):
        engine.submit(lease(is_exact=False))


def test_tokens_of_an_aborted_request_are_discarded_and_the_slot_is_free(engine: VllmEngine, llm: FakeLlm) -> None:
    llm.is_silent = True
    engine.submit(lease())
    engine.step()
    engine.abort(0)
    reports = engine.step()
    assert [(report.is_aborted, report.segments) for report in reports] == [(True, ())]
    assert not engine.running


def test_only_sync_runs_may_record_routing_in_vllm() -> None:
    tree: dict[str, Any] = {
        "run": {"name": "r"},
        "model": {"path": "m"},
        "task": [{"name": "chain_sum"}],
        "rollout": {"mode": "async"},
        "engine": {"kind": "vllm", "report_routing": True},
        "trainer": {"moe_replay": "engine"},
    }
    with pytest.raises(ValueError, match=r"a response must have one version; set rollout\.mode = 'sync'"):
        Recipe.model_validate(tree)
    del tree["rollout"]
    assert "routing" in Recipe.model_validate(tree).choices()["vllm"]

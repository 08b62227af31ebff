"""Which arguments of vLLM are refused, for engines and for the servers of generative reward models."""

from __future__ import annotations

from typing import Any

import pytest

from baton.rewards.scorer_protocol import GenerativeModelSpec
from baton.specs.vllm_arguments import Program, refusal_of


@pytest.mark.parametrize(
    ("program", "name", "advice"),
    [
        ("engine", "model", "use model.path"),
        ("reward", "model", "use model"),
        ("engine", "max_num_seqs", "use engine.slots"),
        ("reward", "max_num_seqs", "use concurrency"),
        ("engine", "tensor_parallel_size", "use engine.vllm.tensor_parallel"),
        ("engine", "nnodes", "a replica that spans several machines"),
        ("engine", "node_rank", "a replica that spans several machines"),
        ("engine", "master_addr", "a replica that spans several machines"),
        ("engine", "master_port", "a replica that spans several machines"),
        ("reward", "nnodes", "each GPU holds the whole model"),
        ("reward", "tensor_parallel_size", "each GPU holds the whole model"),
        ("reward", "tensor_parallel", "each GPU holds the whole model"),  # an abbreviation
        ("reward", "no_enable_ssl_refresh", "Baton starts the server"),
        ("reward", "kv_cache_memory_bytes", "lower context_tokens or concurrency"),
    ],
)
def test_an_argument_that_baton_sets_is_refused_with_the_key_that_replaces_it(
    program: Program, name: str, advice: str
) -> None:
    found = refusal_of(program, name)
    assert found is not None
    assert found.startswith("Baton sets this argument of vLLM; ")
    assert advice in found


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("trust_remote_code", True),
        ("trust_rem", True),
        ("no_trust_remote_code", False),
        ("worker_cls", "mine.Worker"),
        ("worker_extension_cls", "mine.Extension"),
        ("scheduler_cls", "mine.Scheduler"),
        ("model_class_overrides", {"LlamaForCausalLM": "mine:Model"}),
        ("logits_processors", ["mine.Processor"]),
        ("middleware", "mine.middleware"),
        ("load_format", "pt"),
        ("load", "pt"),
        ("tool_parser_plugin", "mine.py"),
        ("reasoning_parser_plugin", "mine.py"),
        ("logging_config", {"handlers": {"x": {"()": "mine.Handler"}}}),
        ("kv_transfer_config", {"kv_connector_module_path": "mine"}),
        ("structured_outputs_config", '{"reasoning_parser_plugin": "mine.py"}'),
        ("compilation_config", {"inductor_passes": {"a": "mine.f"}}),
    ],
)
def test_a_reward_model_takes_no_argument_that_executes_code(name: str, value: Any) -> None:
    assert "it can execute code" in (refusal_of("reward", name, value) or "")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tokenizer_mode", "mistral"),
        ("model_impl", "transformers"),
        ("reasoning_parser", "qwen3"),
        ("max_num_batched_tokens", 4096),
        ("kv_cache_dtype", "fp8"),
        ("data_parallel_rpc_port", 1),
        ("hf_overrides", {"rope_theta": 1e6}),
        ("config_format", "hf"),
        ("compilation_config", {"cudagraph_mode": "NONE"}),
        ("no_enable_prefix_caching", True),
    ],
)
def test_other_arguments_of_a_reward_model_are_allowed_also_if_their_names_begin_like_refused_ones(
    name: str, value: Any
) -> None:
    assert refusal_of("reward", name, value) is None


def test_an_engine_takes_full_names_only_and_code_only_where_baton_does_not_set_it() -> None:
    assert refusal_of("engine", "trust_remote_code") is None  # `check_source` accepts it from the worker's user only
    assert refusal_of("engine", "max_num") is None  # AsyncEngineArgs refuses it
    assert refusal_of("engine", "kv_cache_memory_bytes") is None
    assert "it can execute code" not in (refusal_of("engine", "worker_cls") or "it can execute code")


def test_every_argument_of_the_command_line_that_baton_writes_is_refused(small: Any) -> None:
    from baton.rewards.server import command_of

    spec = GenerativeModelSpec(str(small.model), "cpu", "float32", "{response}", "(.)", 9, 99, 2, {})
    own = [each[2:].partition("=")[0].replace("-", "_") for each in command_of(spec, 1, "cpu") if each[:2] == "--"]
    assert len(own) >= 10
    assert [name for name in own if refusal_of("reward", name) is None] == []

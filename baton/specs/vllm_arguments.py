"""Arguments of vLLM that Baton sets itself, for an engine and for the server of a generative reward model."""

from __future__ import annotations

from typing import Any, Literal

Program = Literal["engine", "reward"]
"""`engine`: [engine.vllm], which passes arguments to AsyncEngineArgs by name. `reward`: the server of a generative
reward model, whose command line also accepts abbreviations and the prefix `no_`."""

_KEY = "use engine.vllm.{name}"
_NO_CODE = "it can execute code that is not part of vLLM, or read a pickle file; remove it"
_WHOLE = "remove it: each GPU holds the whole model"
_SERVER = "remove it: Baton starts the server on 127.0.0.1, with a random key"
_MEMORY = "lower context_tokens or concurrency"
_NODES = "remove it: `baton train --plan --ray` sets it for a replica that spans several machines"
_READS = "remove it, because Baton loads weights and reads logprobs through it"
_LEASES = "remove it, because leases depend on its value"
_ROWS: tuple[tuple[str, str, str], ...] = (
    ("model tokenizer revision model_weights tokenizer_revision hf_config_path", "use model.path", "use model"),
    ("model_tag served_model_name", "", "use model"),
    ("dtype", "use engine.dtype", "use dtype"),
    ("quantization", _KEY, "use dtype"),
    ("quantization_config", "use engine.vllm.quantization", "use dtype"),
    ("max_model_len", "use engine.max_context_tokens", "use context_tokens"),
    ("max_num_seqs", "use engine.slots", "use concurrency"),
    ("gpu_memory_utilization", _KEY, _MEMORY),
    ("kv_cache_memory_bytes num_gpu_blocks_override", "", _MEMORY),
    ("kv_cache_dtype enforce_eager return_sampling_mask stream_interval", _KEY, ""),
    ("enable_lora max_loras max_cpu_loras max_lora_rank", "use engine.vllm.lora_rank", ""),
    ("hf_overrides", "use model.head_dtype", ""),
    ("enable_sleep_mode", "use rollout.placement", ""),
    ("enable_return_routed_experts", "use engine.report_routing", ""),
    ("tensor_parallel_size", "use engine.vllm.tensor_parallel", _WHOLE),
    ("pipeline_parallel_size", "use engine.vllm.pipeline_parallel", _WHOLE),
    ("data_parallel_size", "use engine.vllm.replicas, or start one worker per replica", _WHOLE),
    ("data_parallel_size_local data_parallel_rank device_ids", "", _WHOLE),
    ("nnodes node_rank master_addr master_port", _NODES, _WHOLE),
    ("prefill_context_parallel_size decode_context_parallel_size distributed_executor_backend", "", _WHOLE),
    ("worker_cls worker_extension_cls load_format", _READS, _NO_CODE),
    ("weight_transfer_config logprobs_mode", _READS, ""),
    ("skip_tokenizer_init enable_prefix_caching disable_log_stats", _LEASES, ""),
    ("generation_config", _LEASES, "remove it: Baton depends on its value"),
    ("uvicorn_log_level", "", "remove it: Baton depends on its value"),
    ("host port uds root_path api_key config headless grpc grpc_port api_server_count", "", _SERVER),
    ("ssl_keyfile ssl_certfile ssl_ca_certs enable_ssl_refresh ssl_cert_reqs ssl_ciphers", "", _SERVER),
    ("trust_remote_code code_revision model_class_overrides logits_processors middleware", "", _NO_CODE),
    ("scheduler_cls io_processor_plugin tool_parser_plugin reasoning_parser_plugin", "", _NO_CODE),
    ("logging_config log_config_file", "", _NO_CODE),
    ("reasoning_parser", "", ""),  # allowed, although it looks like an abbreviation of `reasoning_parser_plugin`
)
"""Each row has three texts. The first lists names of arguments. The second is the advice to a user who sets one of them
in [engine.vllm], and the third is the advice to a user who sets one in [[reward]]. If the advice for a section is
empty, this section allows the arguments."""
_CODE_KEYS = "reasoning_parser_plugin", "kv_connector_module_path", "ec_connector_module_path", "inductor_passes"
"""Keys that can execute code if they are in the table of an argument such as `kv_transfer_config`."""
_ADVICE: dict[Program, dict[str, str]] = {
    "engine": {name: advice.format(name=name) for names, advice, _ in _ROWS for name in names.split()},
    "reward": {name: advice for names, _, advice in _ROWS for name in names.split()},
}


def refusal_of(program: Program, name: str, value: Any = None) -> str | None:
    """Return why an argument of vLLM is refused, and what to do instead; None if it is allowed."""
    advice = _ADVICE[program]
    found = advice.get(name)
    if program == "reward" and found is None:
        short = name.removeprefix("no_")
        found = advice.get(short) or next((why for own, why in advice.items() if why and own.startswith(short)), "")
        if any(key in str(value) for key in _CODE_KEYS):  # the value may also be the text of a JSON object
            found = _NO_CODE
    return f"Baton sets this argument of vLLM; {found}" if found and found != _NO_CODE else found or None

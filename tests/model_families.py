"""A tiny configuration for each architecture that support.toml lists as tested, and for some that it refuses."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PretrainedConfig

_SHAPE: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_ROUTED = {**_EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1}
_GROUPED = {**_ROUTED, "n_group": 1, "topk_group": 1}
_LATENT = {
    **_GROUPED,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "num_key_value_heads": 2,
    "head_dim": 4,
}
_WINDOW = {"sliding_window": 4}
"""Shorter than prompt and response, so that it matters."""

_OWN: dict[str, dict[str, Any]] = {
    "afmoe": _EXPERTS | _WINDOW,
    "codegen": {"rotary_dim": 4, "num_attention_heads": 4},
    "cohere2": _WINDOW,
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "dots1": _GROUPED,
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "moe_num_shared_experts": 1},
    "exaone4": _WINDOW,
    "falcon": {"head_dim": ...},
    "flex_olmo": _EXPERTS,
    "flint": _EXPERTS | _WINDOW | {"shared_expert_intermediate_size": 16, "mlp_only_layers": [0]},
    "gemma2": _WINDOW,
    "gemma3_text": _WINDOW | {"layer_types": ["sliding_attention", "full_attention"]},
    "glm4_moe": _ROUTED,
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "num_heads": 2, "window_size": 4},
    "gpt_oss": _EXPERTS | _WINDOW,
    "gptj": {"rotary_dim": 4},
    "granitemoe": _EXPERTS,
    "granitemoeshared": _EXPERTS,
    "hunyuan_v1_moe": _EXPERTS,
    "jetmoe": _EXPERTS,
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "minimax_m2": _EXPERTS,
    "ministral": _WINDOW,
    "mistral": _WINDOW,
    "mixtral": _EXPERTS | _WINDOW,
    "olmo3": _WINDOW | {"layer_types": ["sliding_attention", "full_attention"]},
    "olmoe": _EXPERTS,
    "opt": {"word_embed_proj_dim": 16, "ffn_dim": 32},
    "phimoe": _EXPERTS,
    "qwen2_moe": _EXPERTS | {"shared_expert_intermediate_size": 16},
    "qwen3_moe": _EXPERTS,
    "qwen3_next": _EXPERTS,
    "xglm": {"d_model": 16, "num_layers": 2, "attention_heads": 2, "ffn_dim": 32},
}
"""What a family has besides `_SHAPE`; `...` leaves a key out."""


def tiny_config(model_type: str, **more: Any) -> PretrainedConfig:
    """Two layers, 16 wide, random weights."""
    shape = {**_SHAPE, **_OWN.get(model_type, {}), **more}
    kind = type(AutoConfig.for_model(model_type))
    return kind(**{key: value for key, value in shape.items() if value is not ...})

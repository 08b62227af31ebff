"""Models in numbers: parameters equal those of transformers' own models, for every family that is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from baton.errors import UserError
from baton.specs.model import ModelSpec, model_spec, read_model

SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 160,
    "vocab_size": 320,
}
GQA = {**SMALL, "num_key_value_heads": 2}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
EXPERTS = {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}
FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("llama", GQA),
    ("llama", {**GQA, "tie_word_embeddings": True, "head_dim": 32, "attention_bias": True}),
    ("mistral", GQA),
    ("qwen2", GQA),
    ("qwen3", {**GQA, "head_dim": 16}),
    ("qwen3_moe", {**GQA, "head_dim": 16, **EXPERTS}),
    ("mixtral", {**GQA, "num_local_experts": 4, "num_experts_per_tok": 2}),
    ("gemma2", {**GQA, "head_dim": 16}),
    ("gemma3_text", {**GQA, "head_dim": 16}),
    ("phi3", {**GQA, "pad_token_id": 0}),
    ("starcoder2", GQA),
    ("cohere", GQA),
    ("opt", {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "ffn_dim": 160, "vocab_size": 320}),
    ("smollm3", {**GQA, "pad_token_id": 0}),
    ("gpt_neox", SMALL),
    ("gpt2", {"n_embd": 64, "n_layer": 4, "n_head": 4, "vocab_size": 320, "n_positions": 128}),
    (
        "deepseek_v3",
        {**SMALL, **LATENT, "moe_intermediate_size": 32, "n_routed_experts": 8, "num_experts_per_tok": 2}
        | {"n_shared_experts": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4, "n_group": 2, "topk_group": 1},
    ),
]


@pytest.mark.parametrize(("family", "changes"), FAMILIES, ids=[f"{name}-{i}" for i, (name, _) in enumerate(FAMILIES)])
def test_parameters_equal_those_of_the_model_itself(family: str, changes: dict[str, Any]) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **changes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    counted = sum(p.numel() for p in {id(p): p for p in model.parameters()}.values())
    spec = model_spec(config.to_dict(), family)
    assert spec.params == pytest.approx(counted, rel=2e-3)
    shortened = config.to_dict()  # as on the Hugging Face hub, where config.json often omits defaults
    if "tie_word_embeddings" not in changes:
        del shortened["tie_word_embeddings"]
    assert model_spec(shortened, family).params == spec.params
    assert spec.kv_values_per_token > 0


def distill(layers: int, hidden: int, heads: int, kv: int, width: int, vocab: int) -> ModelSpec:
    return model_spec(
        {
            "model_type": "qwen2",
            "num_hidden_layers": layers,
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_key_value_heads": kv,
            "intermediate_size": width,
            "vocab_size": vocab,
            "tie_word_embeddings": False,
        },
        "distill",
    )


@pytest.mark.parametrize(
    ("sizes", "billions", "kv_bytes"),
    # DeepSeek-R1-Distill-Qwen 1.5B, 7B, 14B: layers · 2 · KV heads · head dimension · 2 bytes
    [
        ((28, 1536, 12, 2, 8960, 151936), 1.777, 28 * 2 * 2 * 128 * 2),
        ((28, 3584, 28, 4, 18944, 152064), 7.615, 28 * 2 * 4 * 128 * 2),
        ((48, 5120, 40, 8, 13824, 152064), 14.77, 48 * 2 * 8 * 128 * 2),
    ],
)
def test_the_papers_models(sizes: tuple[int, ...], billions: float, kv_bytes: int) -> None:
    spec = distill(*sizes)
    assert spec.params / 1e9 == pytest.approx(billions, rel=1e-3)
    assert spec.kv_bytes_per_token() == kv_bytes


def test_a_mixture_of_experts_computes_with_a_part_of_its_parameters() -> None:
    """2 of 8 experts of 3·64·32 = 6144 parameters: the other 6 are read by other tokens."""
    spec = model_spec({**GQA, "model_type": "qwen3_moe", "head_dim": 16, **EXPERTS}, "moe")
    assert spec.ffn_params - spec.active_ffn_params == 6 * 6144
    assert spec.experts_read(1) == pytest.approx(2 / 8)
    assert spec.experts_read(4) == pytest.approx(1 - 0.75**4)


def test_sliding_windows_bound_what_a_query_sees() -> None:
    spec = model_spec({**GQA, "model_type": "gemma2", "head_dim": 16, "sliding_window": 100}, "windows")
    assert spec.window_layers == 2
    assert spec.seen(1000) == (100 + 1000) / 2


def test_the_language_part_of_a_larger_config_is_read() -> None:
    spec = model_spec({"model_type": "qwen2_5_vl", "text_config": {"model_type": "qwen2", **GQA}}, "vision")
    assert spec.hidden == 64


def test_mistakes_name_the_file_and_key(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    with pytest.raises(UserError, match="no model config"):
        read_model(file)
    file.write_text(json.dumps({**SMALL, "num_hidden_layers": 0}))
    with pytest.raises(UserError, match=r"config.json: num_hidden_layers: got 0"):
        read_model(tmp_path)
    file.write_text(json.dumps({"hidden_size": 8}))
    with pytest.raises(UserError, match="num_hidden_layers or n_layer"):
        read_model(tmp_path)
    file.write_text(json.dumps({**SMALL, "num_key_value_heads": 3}))
    with pytest.raises(UserError, match="allowed are divisors of 4"):
        read_model(tmp_path)
    for key, value in (("n_shared_experts", "two"), ("first_k_dense_replace", -1), ("decoder_sparse_step", 1.5)):
        file.write_text(json.dumps({**GQA, **EXPERTS, key: value}))
        with pytest.raises(UserError, match=rf"config.json: {key}: got {value!r}, allowed is a whole number"):
            read_model(tmp_path)
    file.write_text("[1]")
    with pytest.raises(UserError, match="got a list"):
        read_model(tmp_path)
    file.unlink()
    for text, said in (("{", "is not JSON"), ("[]", "got a list"), ("{}", "base_model_name_or_path: got None")):
        (tmp_path / "adapter_config.json").write_text(text)
        with pytest.raises(UserError, match=rf"adapter_config.json.*{said}"):
            read_model(tmp_path)

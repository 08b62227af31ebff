"""Parameters, bytes and FLOPs of a model, read from a Hugging Face config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from baton.errors import UserError

CACHE_BLOCK = 128
"""Number of positions in a block of vLLM's KV cache on a CPU. On a GPU, a block has only 16 positions, so this number
is an upper bound."""
WITHOUT_GATE = {"gpt2", "gpt_neox", "gptj", "opt", "phi", "starcoder2", "falcon", "bloom", "gpt_bigcode", "persimmon"}
"""Model types whose feed-forward layer has two matrices instead of three (no gate)."""
BIASED = {"gpt2", "gpt_neox", "opt", "phi", "starcoder2"}
"""Model types with a bias in every linear layer and in the norms."""
QKV_BIASED = {"qwen2", "qwen2_moe", "qwen2_vl", "qwen2_5_vl"}
"""Model types with a bias in the query, key and value projections, even if the config does not mention it."""
HEAD_NORMED = {"qwen3", "qwen3_moe", "gemma3", "gemma3_text", "qwen3_next"}
"""Model types with a norm for the queries and keys of each head."""
FOUR_NORMS = {"gemma2", "gemma3", "gemma3_text"}
"""Model types with four norms in each layer. Other types have two."""
TIED = {
    *("bloom", "cohere", "cohere2", "ernie4_5", "falcon", "gemma", "gemma2", "gemma3", "gemma3_text", "gpt2"),
    *("gpt_bigcode", "gpt_neo", "lfm2", "mpt", "opt", "smollm3", "starcoder2", "xglm"),
}
"""Families whose configuration in transformers ties the embeddings unless config.json states otherwise."""
SYNONYMS = {
    "num_hidden_layers": ("n_layer", "num_layers", "n_layers"),
    "hidden_size": ("n_embd", "d_model", "dim"),
    "num_attention_heads": ("n_head", "num_heads", "n_heads"),
    "num_key_value_heads": ("num_kv_heads", "n_kv_heads"),
    "intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size", "hidden_dim"),
    "num_experts": ("num_local_experts", "n_routed_experts", "moe_num_experts"),
    "num_experts_per_tok": ("num_experts_per_token", "moe_top_k", "top_k_experts"),
}
NESTED = ("text_config", "llm_config", "language_config")
"""Keys under which a multimodal model's config has the config of its language model."""


class ModelSpec(msgspec.Struct, frozen=True):
    """The numbers of a model that determine time and memory."""

    name: str
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    is_tied: bool
    """Whether the input embedding and the output head share their weights."""
    attention_params: float
    """Number of parameters of a layer's attention, including biases, averaged over layers."""
    ffn_params: float
    """Number of parameters of a layer's feed-forward part, including all experts and the router, averaged over
    layers."""
    active_ffn_params: float
    """Number of feed-forward parameters that one token uses in a layer, averaged over layers."""
    other_params: float
    """Number of parameters of norms and learned position embeddings in the whole model."""
    kv_values_per_token: float
    """Number of values per token and layer in the KV cache."""
    num_experts: int = 1
    experts_per_token: int = 1
    expert_params: float = 0.0
    """Number of parameters of a layer's routed experts, averaged over layers; 0 without experts."""
    window: int = 0
    """Number of tokens that a layer with sliding-window attention attends to."""
    window_layers: int = 0

    @property
    def embedding_params(self) -> int:
        """Number of parameters of the input embedding, or of the output head: vocab · hidden."""
        return self.vocab * self.hidden

    @property
    def layer_params(self) -> float:
        return self.attention_params + self.ffn_params

    @property
    def params(self) -> float:
        tables = self.embedding_params * (1 if self.is_tied else 2)
        return self.num_layers * self.layer_params + tables + self.other_params

    @property
    def layer_flops_per_token(self) -> float:
        """FLOPs of one token's matrix products with the weights of one layer, in a forward pass."""
        return 2.0 * (self.attention_params + self.active_ffn_params)

    @property
    def head_flops_per_token(self) -> float:
        return 2.0 * self.embedding_params

    @property
    def attention_flops_per_pair(self) -> float:
        """FLOPs of attention in one layer for one pair of query and key, in a forward pass: 2 products of 2 FLOPs per
        head dimension."""
        return 4.0 * self.num_heads * self.head_dim

    def kv_bytes_per_token(self, bytes_per_value: float = 2.0) -> float:
        return self.kv_values_per_token * self.num_layers * bytes_per_value

    def seen(self, context_tokens: float) -> float:
        """Return the number of tokens that a query at position `context_tokens` attends to, averaged over layers."""
        if not self.window_layers:
            return context_tokens
        share = self.window_layers / self.num_layers
        return (1 - share) * context_tokens + share * min(context_tokens, self.window)

    def experts_read(self, num_tokens: float) -> float:
        """Return the share of a layer's routed experts that at least one of `num_tokens` tokens uses. Tokens are
        assumed to select experts independently."""
        if self.num_experts <= 1:
            return 1.0
        return float(1 - (1 - self.experts_per_token / self.num_experts) ** max(num_tokens, 0.0))


def read_model(path: Path) -> ModelSpec:
    """Read the config.json of a model. `path` is the file, the model's directory, or the directory of an adapter for
    the model. The base model of an adapter may be in the Hugging Face cache. Raises UserError if the file or a required
    key is missing, or a value is invalid."""
    file = path / "config.json" if path.is_dir() else path
    name = file.parent.name if file.name == "config.json" else file.stem
    if not file.is_file() and (adapter := path / "adapter_config.json").is_file():
        file, name = _base_config(adapter)
    if not file.is_file():
        raise UserError(f"there is no model config at {file}: give a Hugging Face model directory or its config.json")
    return model_spec(_read_object(file), name, str(file))


def _base_config(adapter: Path) -> tuple[Path, str]:
    """Return the config.json and the name of the base model of an adapter."""
    config = _read_object(adapter)
    base, revision = config.get("base_model_name_or_path"), config.get("revision")
    if not isinstance(base, str):
        raise UserError(f"{adapter}: base_model_name_or_path: got {base!r}, allowed is the adapter's base model")
    if Path(base).is_dir():
        return Path(base) / "config.json", Path(base).name
    from huggingface_hub import try_to_load_from_cache  # imported here because the import is slow

    try:
        found = try_to_load_from_cache(base, "config.json", revision=revision)
    except ValueError:  # not a valid name
        found = None
    if not isinstance(found, str):
        name = f"{base}@{revision}" if revision else base
        raise UserError(
            f"{adapter}: base_model_name_or_path: {name!r} is neither a directory nor in the Hugging Face cache: "
            f"change it, or run `hf download {base}`"
        )
    return Path(found), base.rpartition("/")[2]


def _read_object(file: Path) -> dict[str, Any]:
    """Read a JSON object. Raises UserError if the file has something else."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{file} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise UserError(f"{file}: got a {type(found).__name__}, allowed is a JSON object")
    return found


def model_spec(config: Mapping[str, Any], name: str, where: str = "config.json") -> ModelSpec:
    """Return the numbers of a model, computed from its Hugging Face config. `where`: name of the config in errors."""
    for key in NESTED:
        if isinstance(config.get(key), Mapping):
            config = {**config, **config[key]}
            break
    reader = _Reader(config, where)
    kind = str(config.get("model_type", ""))
    layers, hidden = reader.whole("num_hidden_layers"), reader.whole("hidden_size")
    heads = reader.whole("num_attention_heads")
    vocab = reader.whole("vocab_size")
    attention, kv_values, head_dim, kv_heads = _attention(reader, kind, hidden, heads)
    ffn, active, num_experts, per_token, expert = _feed_forward(reader, kind, layers, hidden)
    window, window_layers = _windows(reader, kind, layers)
    norms = (4 if kind in FOUR_NORMS else 2) * layers + 1
    per_norm = hidden * (2 if kind in BIASED else 1)
    positions = 0
    if kind in ("gpt2", "opt"):
        positions = reader.whole("n_positions", reader.whole("max_position_embeddings", 1024)) * hidden
    return ModelSpec(
        name=name,
        num_layers=layers,
        hidden=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=vocab,
        is_tied=bool(config.get("tie_word_embeddings", kind in TIED)),
        attention_params=attention,
        ffn_params=ffn,
        active_ffn_params=active,
        other_params=norms * per_norm + positions,
        kv_values_per_token=kv_values,
        num_experts=num_experts,
        experts_per_token=per_token,
        expert_params=expert,
        window=window,
        window_layers=window_layers,
    )


class _Reader:
    """Reads config values under the different names that model families use for them."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self.config, self.where = config, where

    def whole(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        names = (key, *SYNONYMS.get(key, ()))
        name = next((name for name in names if self.config.get(name) is not None), None)
        if name is None:
            if default is None:
                raise UserError(f"{self.where}: {' or '.join(names)} is missing")
            return default
        value = self.config[name]
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise UserError(f"{self.where}: {name}: got {value!r}, allowed is a whole number of at least {least}")
        return value

    def has(self, key: str) -> bool:
        return any(self.config.get(name) for name in (key, *SYNONYMS.get(key, ())))


def _attention(reader: _Reader, kind: str, hidden: int, heads: int) -> tuple[float, float, int, int]:
    """Return a layer's attention parameters, KV values per token, head dimension and number of KV heads."""
    if reader.has("kv_lora_rank"):
        return _latent_attention(reader, hidden, heads)
    if not reader.has("head_dim") and hidden % heads:
        raise UserError(
            f"{reader.where}: hidden_size: got {hidden}, not a multiple of num_attention_heads {heads}, and no head_dim"
        )
    head_dim = reader.whole("head_dim", hidden // heads)
    one_kv_head = 1 if reader.config.get("multi_query") else heads
    kv_heads = reader.whole("num_key_value_heads", one_kv_head)
    if heads % kv_heads:
        raise UserError(f"{reader.where}: num_key_value_heads: got {kv_heads}, allowed are divisors of {heads}")
    q, kv = heads * head_dim, kv_heads * head_dim
    params = float(hidden * (q + 2 * kv) + q * hidden)
    if kind in BIASED or reader.config.get("attention_bias"):
        params += q + 2 * kv + hidden
    elif kind in QKV_BIASED:
        params += q + 2 * kv
    if kind in HEAD_NORMED:
        params += 2 * head_dim
    return params, 2.0 * kv, head_dim, kv_heads


def _latent_attention(reader: _Reader, hidden: int, heads: int) -> tuple[float, float, int, int]:
    """Return the values of `_attention` for multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), whose cache
    has one compressed vector per token."""
    rank, rope = reader.whole("kv_lora_rank"), reader.whole("qk_rope_head_dim")
    nope, value = reader.whole("qk_nope_head_dim"), reader.whole("v_head_dim")
    query = heads * (nope + rope)
    if reader.has("q_lora_rank"):
        q_rank = reader.whole("q_lora_rank")
        params = hidden * q_rank + q_rank + q_rank * query
    else:
        params = hidden * query
    params += hidden * (rank + rope) + rank + rank * heads * (nope + value) + heads * value * hidden
    # scores use nope + rope dimensions and outputs use value dimensions; head_dim is their mean
    return float(params), float(rank + rope), (nope + rope + value) // 2, 1


def _feed_forward(reader: _Reader, kind: str, layers: int, hidden: int) -> tuple[float, float, int, int, float]:
    """Return the fields of `ModelSpec` that describe feed-forward parts: `ffn_params`, `active_ffn_params`,
    `num_experts`, `experts_per_token` and `expert_params`."""
    matrices = 2 if kind in WITHOUT_GATE else 3
    width = reader.whole("intermediate_size", 4 * hidden)
    dense = float(matrices * hidden * width)
    if kind in BIASED:
        dense += width + hidden
    if not reader.has("num_experts"):
        return dense, dense, 1, 1, 0.0
    experts, per_token = reader.whole("num_experts"), reader.whole("num_experts_per_tok", 1)
    if per_token > experts:
        raise UserError(f"{reader.where}: num_experts_per_tok: got {per_token}, allowed are 1 to num_experts {experts}")
    expert_width = reader.whole("moe_intermediate_size", width)
    expert = float(matrices * hidden * expert_width)
    shared = reader.whole("n_shared_experts", 0, least=0) * expert
    if reader.config.get("shared_expert_intermediate_size"):
        shared = matrices * hidden * reader.whole("shared_expert_intermediate_size") + hidden
    router = hidden * experts
    first_dense, every = reader.whole("first_k_dense_replace", 0, least=0), reader.whole("decoder_sparse_step", 1)
    sparse = sum(1 for layer in range(first_dense, layers) if (layer + 1) % every == 0) / layers
    always, routed = (1 - sparse) * dense + sparse * (router + shared), sparse * experts * expert
    return always + routed, always + sparse * per_token * expert, experts, per_token, routed


def paged_cache_bytes(model: ModelSpec, sequences: int, context_tokens: int, value_bytes: int) -> int:
    """Return the bytes of vLLM's KV cache for `sequences` sequences of `context_tokens` tokens each: whole blocks, and
    a margin of 16 MiB."""
    blocks = sequences * (context_tokens // CACHE_BLOCK + 1)
    return int(blocks * CACHE_BLOCK * model.kv_bytes_per_token(value_bytes)) + 2**24


def _windows(reader: _Reader, kind: str, layers: int) -> tuple[int, int]:
    window = reader.config.get("sliding_window")
    if not isinstance(window, int) or window < 1 or reader.config.get("use_sliding_window") is False:
        return 0, 0
    types = reader.config.get("layer_types")
    if isinstance(types, list):
        return window, types.count("sliding_attention")
    pattern = reader.whole("sliding_window_pattern", {"gemma2": 2, "gemma3_text": 6, "gemma3": 6}.get(kind, 0))
    return window, layers - layers // pattern if pattern else layers

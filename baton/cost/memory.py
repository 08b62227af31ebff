"""The memory of a process that trains, generates or does both. The planner and `baton train --dry-run` use these
formulas.

A trainer rank passes through phases. Each phase holds the state and some working memory; the largest phase is the peak.

    state     weights and two moments in float32, gradients in float32, frozen models
    forward   state, kept activations, copies in the computing dtype
    head      state, kept activations, the head's gradient, pieces of logits
    blocks    state, kept activations, one block: gathered weights, activations, gradients
    tables    state, gradients of embedding and head
    update    state and one tensor's new moments in float32, if moments are stored in 8 bits
    publish   state and a copy of the weights, if this process publishes versions

Writing a checkpoint is not a phase, because one tensor is written at a time.

With several ranks, FSDP shards the state, and gathers the next block while the current block is computed. The byte
counts of tensors follow from the code of the trainer and of Qwen3 in transformers; `benchmarks/memory` compares the
counts with measurements. Memory outside of tensors is an assumption, which `Term.is_assumed` marks. All functions take
numbers, or numpy arrays of equal length.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from baton.specs.model import ModelSpec, paged_cache_bytes

Array = Any
"""A number or an array of numbers."""

MAX_LOGITS = 2**24
"""A trainer may always compute this number of logits at a time (`policy/head.py`). It computes more, up to
`MOST_LOGITS`, only if this does not increase its peak memory."""
MOST_LOGITS = 2**28
"""Maximum number of logits that a trainer computes at a time."""
LOGIT_BYTES = 10.0
"""Bytes per logit: product in bfloat16 (2), logit in float32 (4), probability or gradient in float32 (4)."""
PRODUCT_ROWS = 8192
"""Number of rows of the head's gradient that CUDA computes at a time in bfloat16 (`policy/head.py`)."""
WEIGHT_BYTES, GRADIENT_BYTES, MOMENTS_BYTES = 4.0, 4.0, 8.0
"""Bytes per trained parameter: float32 master weight, float32 gradient, two float32 moments."""
PACKED_MOMENTS_BYTES = 2 * (1 + 4 / 256)
"""Bytes of AdamW's two moments per trained parameter, if they are stored in 8 bits with a float32 scale for each 256
values."""
SLOT_MULTIPLE = 8
"""The number of slots of an engine is a positive multiple of this number (`engine.slots`)."""
KEPT_CONTEXTS = 8
"""Maximum number of contexts whose keys and values an embedded engine keeps outside its slots. On a CPU, an engine with
many slots may keep more contexts."""
GPU_CONTEXT_BYTES = 1.5e9
"""Assumed bytes of the CUDA context, NCCL's buffers, and workspaces of cuBLAS and attention."""
PUBLISHED_COPY = "published copy"
SLEEPING_VLLM_BYTES = 3e9
"""Assumed bytes that a sleeping vLLM keeps on each GPU: the CUDA context, NCCL's buffers and CUDA graphs."""
BYTES_OBJECT = 41.0
"""Bytes of an empty Python `bytes` object, plus the pointer to this object in a tuple."""
RUNTIME_BYTES = 0.7e9
"""Assumed bytes of Python, torch and transformers in a process on a CPU."""
FRAGMENTATION = 0.04
"""Assumed memory that the allocator reserves but that no tensor uses, as a share of the tensors' bytes."""


class Term(msgspec.Struct, frozen=True):
    """One use of memory: `fixed + layers · per_layer` bytes."""

    name: str
    fixed: Array
    per_layer: Array = 0.0
    is_assumed: bool = False

    def bytes(self, layers: Array) -> Array:
        return self.fixed + layers * self.per_layer


class Phase(msgspec.Struct, frozen=True):
    """Memory that a process holds at the same time."""

    name: str
    terms: tuple[Term, ...]

    def bytes(self, layers: Array) -> Array:
        return sum(term.bytes(layers) for term in self.terms)


class RankShape(msgspec.Struct, frozen=True, kw_only=True):
    """How a rank trains. Array fields have one value per candidate of the planner's search."""

    tokens: Array
    """Tokens of a microbatch on this rank."""
    shards: Array = 1
    """Number of ranks over which FSDP shards one copy of the model."""
    split: Array = 1
    """Tensor-parallel width: number of ranks that split each matrix product of the blocks."""
    splits_tables: bool = False
    """Whether tensor parallelism also splits embedding and head, as Megatron does. Baton's trainer does not."""
    is_stage: Array = False
    """Whether the trainer has several pipeline stages. FSDP then copies a block's weights before it computes the block,
    even if the stage has only one rank."""
    value_bytes: int = 2
    """Bytes of a value in linear layers: 2 if autocast (one process) or FSDP (several ranks) casts to bfloat16."""
    recomputes: bool = True
    whole_gradients: bool = False
    """Whether gradients are reduced only once per update, so that each rank holds the gradients of all parameters until
    then."""
    adapter_params: float = 0.0
    """Parameters of the trained adapter; 0 if all weights are trained."""
    base_bytes: float = 4.0
    """Bytes per frozen weight of the base model when an adapter is trained."""
    moments_bytes: float = MOMENTS_BYTES
    """Bytes of AdamW's two moments per trained parameter."""
    has_critic: bool = False
    reference_bytes: float = 0.0
    """Bytes per weight of the frozen reference model; 0 without a reference model."""
    on_cpu: bool = False
    published_bytes: Array = 0.0
    """Bytes per weight in the copy that this process publishes; 0 if another process publishes."""
    previous_bytes: float = 0.0
    """Bytes per weight of the previously published version, if this process keeps that version to compute a difference
    or to send it to a slow replica; otherwise 0."""
    float32_head: bool = False
    """Whether the head computes in float32 while other layers compute in bfloat16."""
    max_kept: int = 0
    """Maximum number of ids in a token's sampling mask; 0 without masks."""
    masked_tokens: float = 0.0
    """Only for ranks on a CPU: number of tokens per batch whose sampling masks a rank holds in memory."""
    replayed_tokens: Array = 0.0
    """A rank replays the recorded experts of this number of tokens per batch; 0 without `trainer.moe_replay`."""
    reported_tokens: float = 0.0
    """Number of tokens of a batch for which the engine reported the selected experts."""


class EngineShape(msgspec.Struct, frozen=True, kw_only=True):
    """Size of an embedded engine."""

    slots: int
    context_tokens: int
    value_bytes: int
    kept_contexts: int = KEPT_CONTEXTS
    """Number of contexts that the engine caches in addition to its slots, so that it can reuse their keys and values.
    Each context counts with the maximum length."""
    float32_head: bool = False
    """Whether a decode step on a CPU casts the head to float32."""
    packs: bool = False
    """Whether the engine keeps a second copy of linear layers in the layout of fast kernels, as in bfloat16 on a
    CPU."""
    adapter_params: float = 0.0
    """Number of parameters of an adapter that the engine merges into its weights; 0 if it loads whole versions."""


def table_params(model: ModelSpec, is_first: Array, is_last: Array) -> Array:
    """Return the number of parameters of a stage's embedding (first stage) and head (last stage). Tied weights count
    once."""
    both = np.logical_and(is_first, is_last) & model.is_tied
    return model.embedding_params * (np.asarray(is_first, float) + np.asarray(is_last, float) - np.asarray(both, float))


def adapter_params(model: ModelSpec, rank: int) -> float:
    """Return the number of parameters of LoRA adapters on all linear layers except fused experts."""
    width, keys = model.num_heads * model.head_dim, model.kv_values_per_token / 2
    mlp = 0.0 if model.num_experts > 1 else 3 * model.hidden + model.ffn_params / model.hidden
    return rank * model.num_layers * (4 * model.hidden + 2 * width + 2 * keys + mlp)


def block_token_bytes(model: ModelSpec, how: RankShape) -> tuple[Array, Array]:
    """Return the bytes per token that a block saves for its backward pass, and the bytes per token of the gradients of
    the block's activations.

    Let H be the hidden size. If FSDP gathers weights in bfloat16, a norm saves its float32 input (4 H bytes), the
    normalised input (2 H) and its output (2 H). For each element of the queries, attention saves the float32 input of
    the norm (4 bytes), the normalised element, the rotated element and the output (2 each). For each element of its
    width, the MLP saves gate, activation, up-projection and product (2 each). Under autocast, the residual stream is
    float32, and the input of each linear layer is also saved in bfloat16.
    """
    hidden, width = model.hidden, model.num_heads * model.head_dim / how.split
    keys, mlp = model.kv_values_per_token / 2 / how.split, model.active_ffn_params / 3 / model.hidden / how.split
    norms = np.where(how.value_bytes == 4, 24.0, np.where(_is_rounded(how), 16.0, 26.0))
    heads = 16.0 if how.value_bytes == 4 else 10.0
    saved = norms * hidden + heads * (width + keys) + 4 * how.value_bytes * mlp
    gradients = how.value_bytes * (2 * mlp + hidden)
    if model.num_experts > 1:  # a copy of the token before and after each expert
        copies = 2 * how.value_bytes * model.experts_per_token * hidden
        saved, gradients = saved + copies, gradients + copies
    return saved, gradients


def _is_rounded(how: RankShape) -> Array:
    """Return whether the residual stream is bfloat16: True if FSDP gathers weights in bfloat16 or frozen weights are
    bfloat16; False under autocast."""
    has_rounded = _gathers(how) | bool(how.adapter_params and how.base_bytes == 2)
    return has_rounded & (how.value_bytes == 2)


def _gathers(how: RankShape) -> Array:
    is_split = (np.asarray(how.split) > 1) & (not how.splits_tables)
    return (np.asarray(how.shards) > 1) | is_split | how.is_stage


def _table_split(how: RankShape) -> Array:
    return how.split if how.splits_tables else 1


def rank_phases(
    model: ModelSpec, how: RankShape, is_first: Array = True, is_last: Array = True, in_flight: Array = 1.0
) -> tuple[Phase, ...]:
    """Return the phases of a rank. `is_first`, `is_last`: whether the rank is on the first or on the last pipeline
    stage; by default there is one stage. `in_flight`: number of microbatches whose activations are kept."""
    first, last = np.asarray(is_first, float), np.asarray(is_last, float)
    tokens, wide, shards = how.tokens, how.value_bytes, np.asarray(how.shards, float)
    is_sharded = _gathers(how).astype(float)
    layer, head = model.layer_params / how.split, model.embedding_params / _table_split(how)
    tables = table_params(model, is_first, is_last) / _table_split(how)
    trains_all = float(not how.adapter_params)
    state = _state(model, how, first, last)

    residual = np.where(_is_rounded(how), 2.0, 4.0)
    if np.any(how.is_stage):  # outputs that wait for their gradients, and a message between stages
        waiting = how.is_stage * ((1 - last) * in_flight + 1)
        state = (*state, Term("hidden states between stages", waiting * tokens * residual * model.hidden))
    if how.max_kept and how.on_cpu:
        held = how.masked_tokens * how.max_kept * (2.0 if model.vocab <= 1 << 16 else 4.0)
        state = (*state, Term("sampling masks of the batch", held))
    if np.any(how.replayed_tokens):  # int16; dense layers are included
        state = (*state, Term("replayed experts", 0.0, how.replayed_tokens * model.experts_per_token * 2.0))
    if how.reported_tokens and how.on_cpu:
        chosen = model.num_layers * model.experts_per_token * (1.0 if model.num_experts <= 256 else 2.0)
        state = (*state, Term("reported experts", how.reported_tokens * (chosen + BYTES_OBJECT)))
    saved, gradients = block_token_bytes(model, how)
    waits = residual * model.hidden if how.recomputes else saved
    later = Term("activations", 0.0, tokens * waits * (in_flight - 1.0))  # of other microbatches
    num_bodies = 1.0 + how.has_critic  # one backward pass goes through the policy and the critic
    kept = Term("activations", last * tokens * 4 * residual * model.hidden, tokens * waits * in_flight * num_bodies)
    # FSDP gathers embedding and head separately when they are used; tied weights stay gathered
    tied = is_sharded * model.is_tied * first * last
    apart = is_sharded - tied
    gathered = Term("gathered embedding", tied * wide * tables)
    logits = min(float(np.max(tokens)) * model.vocab, float(MAX_LOGITS)) / _table_split(how)
    float32_factor = 4 * head * (how.float32_head and how.on_cpu and wide == 2)
    # an id takes four bytes, and there are two copies: of the policy's tokens, and of all positions of a padded pass
    masks = (Term("sampling masks", last * tokens * how.max_kept * 2 * 4.0),) if how.max_kept else ()
    pieces = Term("logits", last * (logits * (LOGIT_BYTES if wide == 2 else 8.0) + float32_factor))
    # autocast keeps a copy of each float32 weight until the forward pass ends
    cast = (1 - is_sharded) * (2.0 if wide == 2 and (trains_all or how.base_bytes == 4) else 0.0)
    of_critic = (1 - is_sharded) * (2.0 if wide == 2 and how.has_critic else 0.0)
    of_layer = cast * (trains_all or not how.recomputes) + of_critic
    copies = Term("copies in bfloat16", last * cast * head, of_layer * layer)
    of_forward = Term("gathered head", apart * last * 2 * wide * head)  # and its receive buffer

    product = 0.0 if how.on_cpu or wide == 4 else 4.0 * min(PRODUCT_ROWS, model.vocab) * model.hidden
    product = np.maximum(product, 2.0 * head * is_sharded * (wide == 2))  # or the sum in the gathered dtype
    head_work = last * (trains_all * (4 * head + product) + (cast + apart * wide) * head + wide * tokens * model.hidden)
    of_head = Term("head and its gradient", head_work + is_sharded * wide * layer)
    # the gradient of the head, then that of each block, is reduced in float32 while the next gradient is computed
    reduced = np.maximum(apart * last * 4 * head, is_sharded * layer * (4 + 4 / shards))
    blocks = is_sharded * layer * 2 * wide + trains_all * reduced + cast * layer
    # the gradient of a tied head is kept until the embedding's gradient is computed
    waiting = trains_all * last * head * np.where(is_sharded > 0, tied * wide, 4.0 * model.is_tied * first)
    blocks = blocks + waiting + tokens * (saved * how.recomputes + gradients)
    # the gathered embedding and head are freed before their gradients are copied to float32
    alone = (1 - is_sharded) * (waiting + 4 * head * first)
    # of tied weights: the gradient of the head, that of the embedding, and their sum, which is then copied to float32
    of_tied = np.maximum(3 * wide, 4) * tables
    of_tables = trains_all * (tied * of_tied + apart * first * (4 + wide + 4 / shards) * head + alone)
    # without recomputation, blocks save copies of weights, which still exist in the head's backward pass
    between = () if how.recomputes else (Term(copies.name, 0.0, copies.per_layer),)
    # the activations of the last norm are freed before the blocks' backward pass
    block_activations = Term(kept.name, 0.0, kept.per_layer)
    found = [
        Phase("forward pass", (*state, kept, gathered, of_forward, copies, pieces, *masks)),
        Phase("backward pass of the head", (*state, kept, gathered, of_head, pieces, *between, *masks)),
        Phase("backward pass of a block", (*state, block_activations, gathered, Term("one block", blocks))),
        Phase(
            "backward pass of the embedding", (*state, later, gathered, Term("gradient of the embedding", of_tables))
        ),
    ]
    if how.moments_bytes < MOMENTS_BYTES:  # the largest tensor of the update is the embedding or the head
        found.append(Phase("update", (*state, Term("new moments in float32", MOMENTS_BYTES * head))))
    trained = how.adapter_params / model.num_layers if how.adapter_params else layer
    at_once = 0.0 if how.adapter_params else tables + model.other_params
    if np.any(how.published_bytes):
        copy = Term(PUBLISHED_COPY, how.published_bytes * at_once, how.published_bytes * trained)
        found.append(Phase("publication", (*state, copy)))
    return tuple(found)


def _state(model: ModelSpec, how: RankShape, first: Array, last: Array) -> tuple[Term, ...]:
    """Return the memory that a rank holds between two microbatches."""
    shards, layer = np.asarray(how.shards, float), model.layer_params / how.split
    others = table_params(model, first > 0, last > 0) / _table_split(how) + model.other_params
    critic = (first * model.embedding_params / _table_split(how) + model.other_params, layer)
    whole = np.where((shards > 1) & how.whole_gradients, 1.0, shards)

    policy = (np.asarray(0.0), how.adapter_params / model.num_layers) if how.adapter_params else (others, layer)
    models = [policy, *([critic] if how.has_critic else [])]

    def held(name: str, num_bytes: float, ranks: Array) -> Term:
        return Term(name, *(num_bytes * sum(part) / ranks for part in zip(*models, strict=True)))

    found = [held("weights", WEIGHT_BYTES, shards), held("gradients", GRADIENT_BYTES, whole)]
    found.append(held("moments", how.moments_bytes, shards))
    frozen = how.reference_bytes + (how.base_bytes if how.adapter_params else 0.0)
    if frozen:
        found.append(Term("frozen weights", frozen * others / shards, frozen * layer / shards))
    if how.previous_bytes:
        found.append(Term("previous version", how.previous_bytes * others, how.previous_bytes * layer))
    return tuple(found)


def engine_terms(model: ModelSpec, engine: EngineShape) -> tuple[Term, ...]:
    """Return the memory that an embedded engine holds."""
    values, linear = engine.value_bytes, model.params - model.embedding_params * (not model.is_tied)
    cache = model.kv_bytes_per_token(values) * engine.context_tokens
    found = [Term("engine: weights", values * model.params), Term("engine: KV cache", engine.slots * cache)]
    found.append(Term("engine: kept keys and values", engine.kept_contexts * cache))
    if engine.packs:
        found.append(Term("engine: packed weights", values * linear))
    if engine.adapter_params:
        found.append(Term("engine: weights without the adapter", values * model.num_layers * model.layer_params))
    if engine.float32_head and engine.packs:
        found.append(Term("engine: head in float32", 4.0 * model.embedding_params))
    return (*found, Term("engine: logits", 4.0 * 4 * engine.slots * model.vocab))


def scorer_terms(model: ModelSpec, value_bytes: int, tokens: float) -> tuple[Term, ...]:
    """Return the memory of a reward model that scores a batch of `tokens` tokens, including padding. The working memory
    is that of one block: the block's input, the norm in float32, and the tensors of attention or of the feed-forward
    part, whichever take more memory. Attention has queries, keys, values and output; the feed-forward part has the
    products."""
    attention = 2 * model.num_heads * model.head_dim + model.kv_values_per_token
    feed_forward = model.active_ffn_params / model.hidden
    block = value_bytes * (2 * model.hidden + max(attention, feed_forward)) + 8 * model.hidden
    params = model.params - (not model.is_tied) * model.embedding_params  # the head has one output
    return (Term("weights", value_bytes * params), Term("one block", tokens * block))


def server_terms(model: ModelSpec, value_bytes: int, sequences: int, context_tokens: int) -> tuple[Term, ...]:
    """Return the memory of a generative reward model in vLLM, with a KV cache for all sequences at full length."""
    cache = paged_cache_bytes(model, sequences, context_tokens, value_bytes)
    return Term("weights", value_bytes * model.params), Term("KV cache", cache)


def overhead(num_bytes: Array, *, on_cpu: bool) -> Term:
    """Return the assumed memory outside of tensors, for a process whose tensors take `num_bytes`."""
    fixed = RUNTIME_BYTES if on_cpu else GPU_CONTEXT_BYTES
    return Term("runtime and fragmentation", fixed + FRAGMENTATION * num_bytes, is_assumed=True)


def state_bytes_per_param(model: ModelSpec, how: RankShape) -> Array:
    """Return the bytes per parameter that a rank holds between two steps: weights and moments."""
    kept = [term for term in _state(model, how, np.asarray(1.0), np.asarray(1.0)) if term.name != "gradients"]
    return sum(term.bytes(model.num_layers) for term in kept) / model.params


def stage_bytes(phases: Iterable[Phase], layers: Array) -> Array:
    """Return the bytes of the largest phase of a stage with `layers` layers."""
    return np.max(np.broadcast_arrays(*(phase.bytes(layers) for phase in phases)), axis=0)


def most_layers(phases: Sequence[Phase], limit_bytes: float) -> Array:
    """Return the number of layers that fit on a stage; negative if its embedding or head does not fit even without
    layers."""
    per_layer = [sum(np.asarray(term.per_layer) for term in phase.terms) for phase in phases]
    most = (np.floor((limit_bytes - phase.bytes(0)) / own) for phase, own in zip(phases, per_layer, strict=True))
    return np.min(np.broadcast_arrays(*most), axis=0)


def fitting_logits(phases: Sequence[Phase], layers: int) -> int:
    """Return how many logits a trainer may compute at a time without an increase of its peak memory. A phase with
    logits may need less memory than the peak. Additional logits beyond `MAX_LOGITS` use at most half of this
    difference."""
    with_logits = (phase for phase in phases if any(term.name == "logits" for term in phase.terms))
    room = float(largest(phases, layers).bytes(layers)) - max(float(phase.bytes(layers)) for phase in with_logits)
    return min(MOST_LOGITS, MAX_LOGITS + int(room / 2 / LOGIT_BYTES))


def largest(phases: Sequence[Phase], layers: int) -> Phase:
    """Return the phase with the most bytes."""
    return max(phases, key=lambda phase: float(phase.bytes(layers)))

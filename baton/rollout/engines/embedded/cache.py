"""Keys and values of many trajectories at once, each at its own position, behind the cache interface of transformers.

One preallocated tensor [slots, length, kv_heads, head_dim] for the keys of each layer and one for its values, never one
stacked tensor. A decode step sees the first `width` slots and the first `kv_length` positions as views, without a copy.
All heads of a token lie together: a new token is one row to write, and a memory page holds fewer, longer runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer

from baton.errors import UserError

KV_BUCKET = 64
"""The cache is as long as a whole number of these positions."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """Keys and values of one sequence of ids, outside the slots."""

    keys: list[Tensor]
    """Per layer [L, kv_heads, head_dim]."""
    values: list[Tensor]
    num_tokens: int


class DecodeWindow:
    """What one decode step sees of the slots; shared by the layers of one cache, set before each step."""

    __slots__ = ("first_W", "kv_length", "places_W", "width")

    def __init__(self) -> None:
        self.width = 0
        self.kv_length = 0
        self.first_W = torch.empty(0, dtype=torch.long)
        """Place of each slot's first position, where places count through all slots."""
        self.places_W = torch.empty(0, dtype=torch.long)
        """Where each row's new key and value go."""


class SlotLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """The slots of one layer."""

    is_sliding = False
    is_compileable = False

    def __init__(self, keys: Tensor, values: Tensor, window: DecodeWindow) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_initialized = True
        self._window = window
        self.hold(keys, values)

    def hold(self, keys: Tensor, values: Tensor) -> None:
        """Let these be the slots."""
        self.keys, self.values = keys, values
        self.slot_keys, self.slot_values = keys, values
        """[slots, length, kv_heads, head_dim]"""
        self._flat_keys, self._flat_values = (t.flatten(0, 1).flatten(1) for t in (keys, values))
        """[slots × length, kv_heads × head_dim], the same memory."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the slots were allocated before."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write each row's one new key and value at its own position; return what the step attends to.

        key_states and value_states: [W, kv_heads, 1, head_dim].
        """
        window = self._window
        width, kv_length = window.width, window.kv_length
        self._flat_keys.index_copy_(0, window.places_W, key_states.reshape(width, -1))
        self._flat_values.index_copy_(0, window.places_W, value_states.reshape(width, -1))
        keys, values = self.slot_keys[:width, :kv_length], self.slot_values[:width, :kv_length]
        return keys.transpose(1, 2), values.transpose(1, 2)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of what `update` returns."""
        return self._window.kv_length, 0

    def get_seq_length(self) -> int:
        """Positions a new token may attend to; every row has its own position, given by position_ids."""
        return self._window.kv_length

    def get_max_length(self) -> int:
        """Positions allocated."""
        return int(self.slot_keys.shape[1])


class SlotCache(Cache):
    """The slots of all layers."""

    def __init__(self, like: Prefix, slots: int, max_context_tokens: int) -> None:
        """Allocate slots shaped as `like`, which a first prefill of the model gave."""
        self.window = DecodeWindow()
        self.length = length = round_up(max_context_tokens, KV_BUCKET)
        """Positions per slot."""
        self._slot_layers = [
            SlotLayer(
                keys.new_zeros((slots, length, *keys.shape[1:])),
                values.new_zeros((slots, length, *values.shape[1:])),
                self.window,
            )
            for keys, values in zip(like.keys, like.values, strict=True)
        ]
        super().__init__(layers=[*self._slot_layers])
        self._num_slots = slots

    @property
    def tensors(self) -> list[Tensor]:
        """The slots of all layers."""
        return [t for layer in self._slot_layers for t in (layer.slot_keys, layer.slot_values)]

    def release(self) -> None:
        """Give the memory back, with all that is in it."""
        for layer in self._slot_layers:
            layer.hold(layer.slot_keys[:0].clone(), layer.slot_values[:0].clone())

    def allocate(self) -> None:
        """Take memory again, after `release`."""
        for layer in self._slot_layers:
            keys, values = layer.slot_keys, layer.slot_values
            layer.hold(*(t.new_zeros((self._num_slots, *t.shape[1:])) for t in (keys, values)))

    def focus(self, width: int, kv_length: int, positions_W: Tensor) -> None:
        """Say what the next step sees: slots below `width`, positions below `kv_length`, one new token per row."""
        window = self.window
        if window.width != width:
            window.width = width
            window.first_W = torch.arange(width, device=positions_W.device) * self.length
        window.kv_length, window.places_W = kv_length, window.first_W + positions_W

    def write(self, slot: int, prefix: Prefix) -> None:
        """Fill the first positions of a slot."""
        for layer, keys, values in zip(self._slot_layers, prefix.keys, prefix.values, strict=True):
            layer.slot_keys[slot, : prefix.num_tokens] = keys
            layer.slot_values[slot, : prefix.num_tokens] = values

    def move(self, source: int, destination: int, num_tokens: int) -> None:
        """Copy the first positions of one slot to another."""
        for layer in self._slot_layers:
            layer.slot_keys[destination, :num_tokens] = layer.slot_keys[source, :num_tokens]
            layer.slot_values[destination, :num_tokens] = layer.slot_values[source, :num_tokens]


def prefill_cache() -> Cache:
    """Return an empty cache that keeps what one prefill computes."""
    return Cache(layer_class_to_replicate=DynamicLayer)


def prefixes(cache: Cache, lengths: Sequence[int]) -> list[Prefix]:
    """Cut the first rows of a filled prefill cache into prefixes of the given lengths: views of one copy per layer."""
    layers = [layer for layer in cache.layers if isinstance(layer, DynamicLayer)]
    keys = [_by_row(layer.keys) for layer in layers if layer.keys is not None]
    values = [_by_row(layer.values) for layer in layers if layer.values is not None]
    return [
        Prefix([k[row][:length] for k in keys], [v[row][:length] for v in values], length)
        for row, length in enumerate(lengths)
    ]


def _by_row(states: Tensor) -> tuple[Tensor, ...]:
    """Turn [rows, kv_heads, L, head_dim] into one contiguous [L, kv_heads, head_dim] per row."""
    return states.transpose(1, 2).contiguous().unbind()


@dataclass(frozen=True, slots=True)
class Masks:
    """The attention masks of a model, whose layers may be full or sliding-window ones."""

    windows: dict[str, int | None]
    """By layer type: the number of positions a token sees, itself included; None is all of them."""
    by_type: bool
    """Whether the model takes one mask per layer type, else one for all layers."""
    dtype: torch.dtype

    def additive(self, query_Q1: Tensor, kv_length: int) -> Tensor | dict[str, Tensor]:
        """Return 0 where a query position may look and -inf elsewhere: [..., Q, kv_length] for queries [..., Q, 1].

        An additive mask serves every attention implementation; a boolean one is misread by the eager one.
        """
        kv = torch.arange(kv_length, device=query_Q1.device)
        seen = torch.zeros((), dtype=self.dtype, device=kv.device)
        unseen = torch.full_like(seen, float("-inf"))
        masks = {}
        for layer_type, window in self.windows.items():
            is_seen = kv <= query_Q1
            if window is not None:
                is_seen &= kv > query_Q1 - window
            masks[layer_type] = torch.where(is_seen, seen, unseen)
        return masks if self.by_type else next(iter(masks.values()))


def masks_for(config: object, max_context_tokens: int, dtype: torch.dtype) -> Masks:
    """Read from a Hugging Face config which masks its layers want. Raises UserError for layers that keep no KV."""
    model_type = getattr(config, "model_type", type(config).__name__)
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(f"model.path: {model_type!r} is an encoder-decoder model; allowed decoder-only ones")
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    layer_types: Sequence[str] = getattr(text, "layer_types", None) or ()
    allowed = ("full_attention", "sliding_attention")
    if unknown := sorted(set(layer_types) - set(allowed)):
        raise UserError(
            f"model.path: {model_type!r} has layers of type {', '.join(unknown)}; the embedded engine serves "
            f"{' and '.join(allowed)}"
        )
    window = getattr(text, "sliding_window", None)
    if window is not None and window >= max_context_tokens:
        window = None
    if not layer_types:
        return Masks({"full_attention": window}, by_type=False, dtype=dtype)
    windows = {t: window if t == "sliding_attention" else None for t in dict.fromkeys(layer_types)}
    return Masks(windows, by_type=len(windows) > 1, dtype=dtype)


def round_up(count: int, multiple: int) -> int:
    """Return the next multiple at or above count, at least one."""
    return max(1, -(-count // multiple)) * multiple

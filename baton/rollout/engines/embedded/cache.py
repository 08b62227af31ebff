"""The KV cache of many trajectories at different positions, with the `Cache` interface of transformers.

Each layer has two preallocated tensors [slots, length, kv_heads, head_dim], one for keys and one for values. A decode
step uses views of the first `width` slots and the first `kv_length` positions, without a copy. The heads of one token
are contiguous, so writing a token copies one contiguous row.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer

from baton.errors import UserError
from baton.policy.threads import unordered_writes
from baton.rollout.engines.slot_table import PrefixKey

KV_BUCKET = 64
"""The number of positions per slot is a multiple of this number."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """A copy of the keys and values of one piece of a token sequence."""

    tensors: list[Tensor]
    """[L, kv_heads, head_dim] The keys of each layer, then the values of each layer."""
    num_tokens: int


class KeptPrefixes:
    """Keys and values of pieces (`slot_table.py: Piece`) that a later lease may need, ordered from the least to the
    most recently used. A lease that needs a piece also needs all pieces before it. Within a sequence, later pieces are
    therefore dropped before earlier pieces."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self._pieces: OrderedDict[PrefixKey, Prefix] = OrderedDict()

    def __getitem__(self, key: PrefixKey) -> Prefix:
        return self._pieces[key]

    def add(self, key: PrefixKey, prefix: Prefix) -> None:
        """Keep a piece. Has no effect if the piece is kept already."""
        if key not in self._pieces:
            self._pieces[key] = prefix
            self.num_tokens += prefix.num_tokens

    def depth(self, keys: Sequence[PrefixKey]) -> int:
        """Return how many successive pieces of a lease are kept, counted from the first piece."""
        return next((i for i, key in enumerate(keys) if key not in self._pieces), len(keys))

    def use(self, keys: Sequence[PrefixKey]) -> None:
        for key in reversed(keys):
            if key in self._pieces:
                self._pieces.move_to_end(key)

    def drop_oldest(self, limit: int) -> None:
        """Drop the least recently used pieces until at most `limit` tokens are kept."""
        while self.num_tokens > limit:
            self.num_tokens -= self._pieces.popitem(last=False)[1].num_tokens

    def clear(self) -> None:
        self._pieces.clear()
        self.num_tokens = 0

    @property
    def tensors(self) -> list[Tensor]:
        return [t for prefix in self._pieces.values() for t in prefix.tensors]


@dataclass(slots=True)
class DecodeWindow:
    """The part of the slots that a decode step uses in all layers, as set by `SlotCache.focus` before the step."""

    width: int = 0
    kv_length: int = 0
    first_W: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))
    """Index of the first position of each slot in the flattened [slots × length]."""
    places_W: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))
    """For each row: index into the flattened [slots × length] at which the row's new key and value are written."""


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
        self.keys, self.values = keys, values  # attributes that transformers expects
        self.slot_keys, self.slot_values = keys, values
        """[slots, length, kv_heads, head_dim]"""
        self._flat_keys, self._flat_values = (t.flatten(0, 1).flatten(1) for t in (keys, values))
        """[slots × length, kv_heads × head_dim] Views of the slots."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing, because the slots are already allocated."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write the new key and value of each row [W, kv_heads, 1, head_dim] at the row's position. Return the keys and
        values of the window, both [W, kv_heads, kv_length, head_dim]."""
        window = self._window
        width, kv_length = window.width, window.kv_length
        with unordered_writes(key_states.device):  # each row writes to a slot of its own
            self._flat_keys.index_copy_(0, window.places_W, key_states.reshape(width, -1))
            self._flat_values.index_copy_(0, window.places_W, value_states.reshape(width, -1))
        keys, values = self.slot_keys[:width, :kv_length], self.slot_values[:width, :kv_length]
        return keys.transpose(1, 2), values.transpose(1, 2)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the length and the offset of the tensors that `update` returns."""
        return self._window.kv_length, 0

    def get_seq_length(self) -> int:
        """Return the number of positions in the window. The position of each row is passed as position_ids."""
        return self._window.kv_length

    def get_max_length(self) -> int:
        return int(self.slot_keys.shape[1])


class SlotCache(Cache):
    """The slots of all layers."""

    def __init__(self, like: Prefix, slots: int, max_context_tokens: int) -> None:
        """Allocate the slots. `like`: keys and values of a prefill, with the same `kv_heads`, `head_dim` and dtype."""
        self.window = DecodeWindow()
        self.length = length = round_up(max_context_tokens, KV_BUCKET)
        """Number of positions per slot."""
        tensors, half = [t.new_zeros((slots, length, *t.shape[1:])) for t in like.tensors], len(like.tensors) // 2
        self._slot_layers = [SlotLayer(k, v, self.window) for k, v in zip(tensors[:half], tensors[half:], strict=True)]
        super().__init__(layers=[*self._slot_layers])
        self._num_slots = slots

    @property
    def tensors(self) -> list[Tensor]:
        """[slots, length, kv_heads, head_dim] The slots, in the order of `Prefix.tensors`."""
        layers = self._slot_layers
        return [*(layer.slot_keys for layer in layers), *(layer.slot_values for layer in layers)]

    def release(self) -> None:
        """Free the memory of the slots; their contents are lost."""
        for layer in self._slot_layers:
            layer.hold(layer.slot_keys[:0].clone(), layer.slot_values[:0].clone())

    def allocate(self) -> None:
        """Allocate the slots again, after `release`."""
        for layer in self._slot_layers:
            layer.hold(*(t.new_zeros((self._num_slots, *t.shape[1:])) for t in (layer.slot_keys, layer.slot_values)))

    def focus(self, width: int, kv_length: int, positions_W: Tensor) -> None:
        """Select the slots below `width` and the positions below `kv_length`. `positions_W`: position of each row's new
        token."""
        window = self.window
        if window.width != width:
            window.width = width
            window.first_W = torch.arange(width, device=positions_W.device) * self.length
        window.kv_length, window.places_W = kv_length, window.first_W + positions_W

    def write(self, slot: int, prefix: Prefix, start: int = 0) -> None:
        """Copy a prefix to the positions of a slot from `start` on."""
        end = start + prefix.num_tokens
        for slots, tensor in zip(self.tensors, prefix.tensors, strict=True):
            slots[slot, start:end] = tensor

    def read(self, slot: int, start: int, end: int) -> Prefix:
        """Return a copy of the positions of a slot from `start` to `end` (exclusive)."""
        return Prefix([slots[slot, start:end].clone() for slots in self.tensors], end - start)

    def reorder(self, order: Sequence[int], lengths: Sequence[int]) -> None:
        """For each i, copy the first `lengths[order[i]]` positions of slot `order[i]` to slot i. `order` is a
        permutation of the lowest slots. In each permutation cycle, only the shortest row is copied to temporary
        memory."""
        left = {slot for slot, source in enumerate(order) if source != slot}
        for first in sorted(left, key=lambda slot: lengths[slot]):
            if first not in left:
                continue
            saved, slot = self.read(first, 0, lengths[first]), first
            while (source := order[slot]) != first:
                self.move(source, slot, lengths[source])
                left.remove(slot)
                slot = source
            self.write(slot, saved)
            left.remove(slot)

    def move(self, source: int, destination: int, num_tokens: int) -> None:
        """Copy the first `num_tokens` positions of slot `source` to slot `destination`."""
        for slots in self.tensors:
            slots[destination, :num_tokens] = slots[source, :num_tokens]


def prefill_cache(pasts: Sequence[Sequence[Prefix]] = (), rows: int = 0, length: int = 0) -> Cache:
    """Return a cache for one prefill. The first `length` positions of the cache have the keys and values of earlier
    pieces. `pasts`: for each row, the pieces before the row's new tokens; rows beyond `pasts` have no pieces. The
    positions from the end of a row's pieces up to `length` are zero and must be masked."""
    cache = Cache(layer_class_to_replicate=DynamicLayer)
    num_layers = next((len(pieces[0].tensors) // 2 for pieces in pasts if pieces), 0)
    for layer in range(num_layers):
        keys, values = (
            _padded([[piece.tensors[index] for piece in pieces] for pieces in pasts], rows, length)
            for index in (layer, num_layers + layer)
        )
        cache.update(keys, values, layer)
    return cache


def _padded(pieces: Sequence[Sequence[Tensor]], rows: int, length: int) -> Tensor:
    """Return [rows, kv_heads, length, head_dim]: each row's pieces [L, kv_heads, head_dim], then zeros."""
    found = pieces[0][0].new_zeros((rows, length, *pieces[0][0].shape[1:]))
    for row, tensors in zip(found, pieces, strict=False):
        start = 0
        for tensor in tensors:
            row[start : start + len(tensor)] = tensor
            start += len(tensor)
    return found.transpose(1, 2)


def prefixes(cache: Cache, start: int, lengths: Sequence[int]) -> list[Prefix]:
    """Return one `Prefix` per row of a prefill cache: a copy of `lengths[row]` positions from `start` on."""
    layers = [layer for layer in cache.layers if isinstance(layer, DynamicLayer)]
    states = [*(layer.keys for layer in layers), *(layer.values for layer in layers)]

    def cut(row: int, length: int) -> list[Tensor]:
        part = slice(start, start + length)
        return [
            s[row, :, part].transpose(0, 1).clone(memory_format=torch.contiguous_format)
            for s in states
            if s is not None
        ]

    return [Prefix(cut(row, n), n) for row, n in enumerate(lengths)]


@dataclass(frozen=True, slots=True)
class Masks:
    """The attention masks of a model with full or sliding-window attention layers."""

    windows: dict[str, int | None]
    """Layer type → number of positions that a token attends to, including its own; None means all positions."""
    by_type: bool
    """Whether the model expects one mask per layer type instead of one mask for all layers."""
    dtype: torch.dtype

    def additive(self, query_Q1: Tensor, kv: Tensor | int) -> Tensor | dict[str, Tensor]:
        """Return additive masks [..., Q, K] for query positions [..., Q, 1]: 0 where attention is allowed, else -inf.
        `kv`: positions of the keys, [..., 1, K]; or the number K if the positions are 0 to K - 1. The masks are not
        boolean, because eager attention adds the mask to the scores."""
        if isinstance(kv, int):
            kv = torch.arange(kv, device=query_Q1.device)
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
    """Return the masks for the layers of a Hugging Face config. Raises UserError for layers without a KV cache."""
    model_type = getattr(config, "model_type", type(config).__name__)
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(f"model.path: got {model_type!r}, an encoder-decoder model; allowed are decoder-only models")
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    layer_types: Sequence[str] = getattr(text, "layer_types", None) or ()
    allowed = ("full_attention", "sliding_attention")
    if unknown := sorted(set(layer_types) - set(allowed)):
        raise UserError(
            f"model.path: got {model_type!r}, which has layers of type {', '.join(unknown)}; the embedded engine "
            f"supports {' and '.join(allowed)}"
        )
    window = getattr(text, "sliding_window", None)
    if window is not None and window >= max_context_tokens:
        window = None
    if not layer_types:
        return Masks({"full_attention": window}, by_type=False, dtype=dtype)
    windows = {t: window if t == "sliding_attention" else None for t in dict.fromkeys(layer_types)}
    return Masks(windows, by_type=len(windows) > 1, dtype=dtype)


def round_up(count: int, multiple: int) -> int:
    """Return the smallest positive multiple of `multiple` that is at least `count`."""
    return max(1, -(-count // multiple)) * multiple

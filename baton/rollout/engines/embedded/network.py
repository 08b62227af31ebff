"""Runs a Hugging Face causal LM by two functions of fixed shapes, prefill and decode, with replaceable weights.

Fixed shapes make a trajectory independent of its neighbours. The shape of a matrix product determines its kernel and so
the order of its sums; within one shape neither the index of a row nor the content of other rows changes its bits. The
shape of prefill therefore follows from the length of the ids alone, and decode has one shape, plus the smaller ones
that compute identical bits. Each engine determines these for its model at start (for prefill, at the first use of a
length). Measured on a CPU:

    rows       float32, one thread: identical bits from 16 rows on, different below; bfloat16 or two threads: it varies
    positions  float32: identical bits at multiples of 16 up to 256, and of 256 beyond; bfloat16: at all lengths

At start a few tokens are computed both by prefill + decode and by the plain forward; a model whose logits differ is
refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from transformers import PreTrainedModel

from baton.errors import EngineFault, UserError, first_line
from baton.policy.adapters import BaseWeights, is_adapter
from baton.policy.memory import held_bytes
from baton.rollout.engines.embedded.cache import (
    KV_BUCKET,
    Masks,
    Prefix,
    SlotCache,
    masks_for,
    prefill_cache,
    prefixes,
    round_up,
)
from baton.rollout.engines.embedded.graphs import CudaCapture, GraphedSteps, Step
from baton.rollout.engines.embedded.packed import PackedLinears
from baton.rollout.engines.embedded.row_attention import Rows, attend_by_row
from baton.rollout.engines.fit import check_fit

_PREFILL_TOKENS = 512
"""Most tokens of a prefill, padding included; longer ids are prefilled as one row."""
_MIN_PREFILL_TOKENS = 32
"""Fewest tokens of a prefill with fewer rows than `prefill_shape` allows."""
_PREFILL_BUCKETS = ((128, 16), (256, 32))
"""(largest length, its bucket): lengths are rounded up to a multiple of the bucket; beyond, of `_LONG_BUCKET`."""
_LONG_BUCKET = 64
MIN_WIDTH = 16
"""Rows of the narrowest decode step."""


def prefill_shape(num_tokens: int) -> tuple[int, int]:
    """Return (most rows, padded length) of a prefill of ids of this length, independent of other ids.

    Lengths are multiples of 16 up to 128, of 32 up to 256, of 64 beyond; 32 rows of 16, 16 of 32, 1 from 257 on.
    """
    bucket = next((bucket for limit, bucket in _PREFILL_BUCKETS if num_tokens <= limit), _LONG_BUCKET)
    length = round_up(num_tokens, bucket)
    return max(1, _PREFILL_TOKENS // length), length


class Network:
    """The model with its slots and attention masks."""

    def __init__(
        self,
        model: PreTrainedModel,
        slots: int,
        max_context_tokens: int,
        *,
        uses_graphs: bool = False,
        attends_by_row: bool = False,
    ) -> None:
        """Allocate the slots. Raises UserError for a model that cannot be driven through a KV cache.

        uses_graphs: `step` uses CUDA graphs, on a CUDA device.
        attends_by_row: decode attends over each row's own length (`row_attention.py`), and always gets the whole cache.
        """
        self._attends_by_row = attends_by_row
        if attends_by_row:
            attend_by_row(model)
        self.model = model.requires_grad_(False)
        self.model.train(False)
        self.device: torch.device = model.device
        self.vocabulary = int(model.config.get_text_config().vocab_size)
        self._max_context_tokens = max_context_tokens
        limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        if limit is not None and max_context_tokens > limit:
            raise UserError(
                f"engine.max_context_tokens: got {max_context_tokens}, allowed at most {limit} (the model's)"
            )
        self._masks: Masks = masks_for(model.config, max_context_tokens, model.dtype)
        self._packed = PackedLinears(model)
        self._body: Module = model.base_model
        """The model without its head: prefill needs no logits."""
        self._base = BaseWeights()
        self._shapes: dict[Parameter, torch.Size] = {}
        """Shapes of the weights that were freed at rest; the next version must be a whole one."""
        self._is_whole = False
        """Whether the last loaded version was a whole model, not an adapter."""
        self.is_resting = False
        self._width = max(MIN_WIDTH, slots)
        self.widths: tuple[int, ...] = ()
        """Ascending decode widths that compute identical bits for a row; the last spans all slots."""
        self.kv_lengths: tuple[int, ...] = ()
        """Ascending numbers of scanned positions that compute identical bits; the last is the whole cache."""
        self.prefill_rows: dict[int, tuple[int, ...]] = {}
        """By padded length: ascending numbers of rows that compute identical bits for a row."""
        self.cache = self._proven_cache()
        self._graphed = GraphedSteps(self.decode, CudaCapture) if uses_graphs and self.device.type == "cuda" else None
        self.step: Step = self._graphed or self.decode
        """`decode`, except that the next step may overwrite the returned logits."""

    def prefill(self, ids: Sequence[Sequence[int]]) -> list[Prefix]:
        """Compute the keys and values of sequences with one `prefill_shape`, at most as many as its rows."""
        most, length = prefill_shape(len(ids[0]))
        assert len(ids) <= most, f"{len(ids)} sequences for a prefill of {most} rows"
        if length not in self.prefill_rows:
            self.prefill_rows[length] = self._same_rows(most, length)
        return self._prefill(ids, next(rows for rows in self.prefill_rows[length] if rows >= len(ids)), length)

    def _prefill(self, ids: Sequence[Sequence[int]], rows: int, length: int) -> list[Prefix]:
        padded = [[*row, *[0] * (length - len(row))] for row in ids] + [[0] * length] * (rows - len(ids))
        query_Q = torch.arange(length, device=self.device)
        position_Q = query_Q.clamp(max=self._max_context_tokens - 1)
        cache = prefill_cache()
        with torch.inference_mode():
            self._body(
                input_ids=torch.tensor(padded, device=self.device),
                attention_mask=self._masks.additive(query_Q[None, None, :, None], length),
                position_ids=position_Q.expand(rows, length),
                past_key_values=cache,
                use_cache=True,
            )
            return prefixes(cache, [len(row) for row in ids])

    def decode(self, ids_W: Tensor, position_W: Tensor, kv_length: int) -> Tensor:
        """Run the model on one id for each of the lowest W slots, at its own position; return the logits [W, V]."""
        with torch.inference_mode():
            self.cache.focus(len(ids_W), kv_length, position_W)
            rows = {"rows": Rows.of(position_W, kv_length)} if self._attends_by_row else {}
            output = self.model(
                **rows,
                input_ids=ids_W[:, None],
                attention_mask=self._masks.additive(position_W[:, None, None, None], kv_length),
                position_ids=position_W[:, None],
                past_key_values=self.cache,
                use_cache=True,
            )
            logits: Tensor = output.logits[:, -1]
            return logits

    def load(self, tensors: Mapping[str, Any]) -> None:
        """Copy new values into the parameters in place, cast to their dtype.

        An adapter is merged into the weights of the last whole version. Tied parameters may have one of their names or
        all. Raises EngineFault, with nothing changed, for missing parameters, unknown names and different shapes.
        """
        own: dict[str, Tensor] = self.model.state_dict(keep_vars=True)
        if is_adapter(tensors):
            if self._shapes:
                raise EngineFault("an adapter has come for weights that were given back: a whole version must be first")
            self._copy(own, self._base.merged(own, tensors))
            self._is_whole = False
            return
        check_fit(self.model, own, tensors)
        self._base.forget()
        self._copy(own, tensors)
        self._shapes.clear()
        self._is_whole = True

    @property
    def held_bytes(self) -> int:
        """Bytes of device memory for slots and weights."""
        weights = (*self.model.parameters(), *self.model.buffers(), *self._base.tensors)
        return held_bytes((*weights, *self.cache.tensors), self.device) + self._packed.held_bytes

    def sleep(self) -> None:
        """Free the device memory of slots and weights.

        After a whole version the weights are dropped, since the next version replaces them. After an adapter the base
        weights are restored and moved to the host. Does nothing if already at rest.
        """
        if self.is_resting:
            return
        self.is_resting = True
        if self._graphed is not None:
            self._graphed.release()
        self.cache.release()
        self._packed.release()
        if not self._is_whole:
            self._base.put_back(self.model.state_dict(keep_vars=True))
        for parameter in self.model.parameters():
            if self._is_whole:
                self._shapes[parameter] = parameter.shape
                parameter.data = parameter.data.new_empty(0)
            else:
                parameter.data = parameter.data.to("cpu")
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # the trainer needs blocks of other sizes

    def wake_up(self) -> None:
        """Allocate slots and weights again; `load` must follow. Does nothing if not at rest."""
        if not self.is_resting:
            return
        self.is_resting = False
        for parameter in self.model.parameters():
            if parameter in self._shapes:
                parameter.data = torch.empty(self._shapes[parameter], dtype=parameter.dtype, device=self.device)
            else:
                parameter.data = parameter.data.to(self.device)
        self.cache.allocate()

    def _copy(self, own: Mapping[str, Tensor], tensors: Mapping[str, Any]) -> None:
        with torch.inference_mode():
            for name, tensor in tensors.items():
                own[name].copy_(tensor)
        self._packed.refresh()

    def _proven_cache(self) -> SlotCache:
        try:
            cache, difference = self._probe()
        except (RuntimeError, TypeError, ValueError, AttributeError, LookupError) as error:
            raise UserError(
                f"model.path: the embedded engine cannot drive {self.model.config.model_type!r} through a KV cache of "
                f"its own: {type(error).__name__}: {first_line(error)}"
            ) from error
        allowed = 0.2 if self.model.dtype == torch.bfloat16 else 1e-3
        if not difference <= allowed:
            raise UserError(
                f"model.path: the embedded engine cannot drive {self.model.config.model_type!r}: with its KV cache "
                f"the logits differ from the plain forward's by {difference:.2g} (relative), allowed {allowed}"
            )
        return cache

    def _probe(self) -> tuple[SlotCache, float]:
        """Allocate the slots; return them and the relative difference of prefill + decode from the plain forward.

        The ids are longer than the longest sliding attention window, where the context allows.
        """
        windows = [w for w in self._masks.windows.values() if w is not None]
        length = min(max([*windows, 0]) + 12, self._max_context_tokens)
        ids = [(7 * i + 1) % self.vocabulary for i in range(length)]
        with torch.inference_mode():
            plain = self.model(input_ids=torch.tensor([ids], device=self.device), use_cache=False)
            expected_V = plain.logits[0, -1].float()
            prefix = self.prefill([ids[:-1]])[0]
            if not prefix.keys:
                raise ValueError("its forward does not write keys and values into the cache it is given")
            self.cache = SlotCache(prefix, self._width, self._max_context_tokens)
            self.cache.write(0, prefix)
            ids_W = torch.full((self._width,), ids[-1], device=self.device)
            got_V = self.decode(ids_W, torch.full_like(ids_W, length - 1), self.cache.length)[0].float()
            self.widths, self.kv_lengths = self._same_shapes(prefix)
            scale = expected_V.norm().clamp_min(1e-30)
            return self.cache, float((got_V - expected_V).norm() / scale)

    def _same_rows(self, most: int, length: int) -> tuple[int, ...]:
        """Return the ascending numbers of rows that compute the same bits as `most` rows of this length."""
        generator = torch.Generator().manual_seed(0)
        limit = min(length, self._max_context_tokens)
        ids = torch.randint(self.vocabulary, (most, limit), generator=generator).tolist()
        halves = [most >> i for i in range(1, 5)] if self.device.type == "cpu" else []
        fewer = [rows for rows in halves if rows and rows * length >= _MIN_PREFILL_TOKENS]
        full = self._prefill(ids, most, length) if fewer else []
        same = [
            rows
            for rows in reversed(fewer)
            if all(_are_equal(a, b) for a, b in zip(self._prefill(ids[:rows], rows, length), full, strict=False))
        ]
        return (*same, most)

    def _same_shapes(self, like: Prefix) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the ascending decode widths and cache lengths that compute the same bits as the largest of each.

        Measured with noise in every position of every slot. On CUDA a narrower step saves almost nothing, so only the
        full width is used.
        """
        generator = torch.Generator().manual_seed(0)
        full = self.cache.length
        noise = Prefix(
            [torch.randn((full, *k.shape[1:]), generator=generator) for k in like.keys],
            [torch.randn((full, *v.shape[1:]), generator=generator) for v in like.values],
            full,
        )
        for slot in range(self._width):
            self.cache.write(slot, noise)
        ids_W = torch.arange(self._width, device=self.device) % self.vocabulary

        def logits(width: int, position: int, kv_length: int) -> Tensor:
            return self.decode(ids_W[:width], torch.full_like(ids_W[:width], position), kv_length)

        last = self._max_context_tokens - 1
        full_WV = logits(self._width, last, full)
        narrower = [w for w in _widths(self._width) if self.device.type == "cpu"]
        widths = [w for w in narrower if torch.equal(logits(w, last, full), full_WV[:w])]
        shorter = [n for n in _kv_lengths(full) if n <= last and not self._attends_by_row]
        lengths = [n for n in shorter if torch.equal(logits(self._width, n - 1, n), logits(self._width, n - 1, full))]
        return (*widths, self._width), (*lengths, full)


def _are_equal(a: Prefix, b: Prefix) -> bool:
    return all(torch.equal(x, y) for x, y in zip((*a.keys, *a.values), (*b.keys, *b.values), strict=True))


def _widths(full: int) -> list[int]:
    """Return the candidate widths below `full`: multiples of 8 up to 64, then four per doubling."""
    doublings = [64 << i for i in range(full.bit_length())]
    tried = [*range(MIN_WIDTH, 64, 8), *[d + d // 4 * quarter for d in doublings for quarter in range(4)]]
    return [w for w in tried if w < full]


def _kv_lengths(full: int) -> list[int]:
    """Return the candidate lengths below `full`: up to 512 at steps of 16 to 64, then two per doubling."""
    step = next((step for step in (16, 32) if full <= 16 * step), KV_BUCKET)
    doublings = [512 << i for i in range(full.bit_length())]
    return [n for n in (*range(step, 512, step), *[n for d in doublings for n in (d, d + d // 2)]) if n < full]

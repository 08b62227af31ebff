"""`Network`: runs a Hugging Face causal LM through prefill and decode in fixed shapes, with replaceable weights.

Fixed shapes make each trajectory independent of the other rows of its batch. The shape of a matrix product determines
which kernel computes it, and thereby the order of summation. Within one shape, neither the index of a row nor the other
rows change the bits of a result. For this reason, the shape of a prefill depends only on the number of ids to prefill
and the number of ids already in the cache. Decode has one shape, plus smaller shapes that compute identical bits. Which
smaller shapes compute identical bits depends on the model. The engine therefore compares results: for decode when the
engine starts, and for prefill when a shape is first used. Results on a CPU:

    rows       float32, one thread: identical bits from 16 rows up; bfloat16 or two threads: depends on the model
    positions  float32: identical bits at multiples of 16 up to 256, then of 256; bfloat16: at all lengths

At start, the model's plain forward pass also computes the logits of a few tokens. The model is refused if these logits
differ from those of decode.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from transformers import PreTrainedModel

from baton.errors import EngineFault, UserError, first_line
from baton.policy.adapters import BaseWeights, is_adapter
from baton.policy.memory import held_bytes
from baton.policy.tensors import load_version
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
from baton.rollout.engines.embedded.kernels import replace_norms
from baton.rollout.engines.embedded.length_classes import Ints, LengthClasses, SlotRange
from baton.rollout.engines.embedded.packed import PackedLinears
from baton.rollout.engines.embedded.row_attention import Rows, attend_by_row, can_attend_by_class

_PREFILL_TOKENS = 512
"""Maximum tokens of a prefill, including padding. A longer sequence is prefilled as a single row."""
_MIN_PREFILL_TOKENS = 32
"""Minimum number of new positions, including padding, in a prefill that uses fewer rows than its shape allows."""
_PREFILL_BUCKETS = ((128, 16), (256, 32))
"""Pairs (maximum length, bucket): a length up to the maximum is rounded up to a multiple of the bucket."""
_LONG_BUCKET = 64
"""Lengths above those in `_PREFILL_BUCKETS` are rounded up to a multiple of this number."""
_PAST_TOKENS = 2048
"""Maximum number of positions, including padding, in a prefill of several rows that continue earlier ids. The positions
of the earlier ids count too, because the prefill copies their keys and values."""
_MASKED_TOKENS = 1024
"""Maximum tokens of a row that one forward of a prefill computes; longer rows take several forwards. The maximum limits
the size of the attention mask, which has an entry for each computed token and each earlier position."""
_NOWHERE = 2**62
"""Position assigned to padded keys, so that no query attends to them."""
MIN_WIDTH = 16
"""Number of rows of the narrowest decode step."""


class PrefillShape(NamedTuple):
    """The shape of a prefill. Sequences of one shape are prefilled together."""

    rows: int
    """Maximum number of sequences."""
    length: int
    """Number of new positions of a row, including padding."""
    past: int
    """Number of earlier positions of a row whose keys and values already exist, including padding."""


def prefill_shape(num_tokens: int, num_past: int = 0) -> PrefillShape:
    """Return the shape of a prefill of `num_tokens` ids after `num_past` ids whose keys and values exist.

    Padded lengths are multiples of 16 up to 128, of 32 up to 256, and of 64 above. Examples: 32 rows of 16 tokens, 16
    rows of 32 tokens, 1 row of 257 or more. Up to 256, `num_past` is padded to a multiple of 64. Above 256, it is
    padded to 384, 512, 768, 1024, 1536, 2048 and so on.
    """
    bucket = next((bucket for limit, bucket in _PREFILL_BUCKETS if num_tokens <= limit), _LONG_BUCKET)
    length = round_up(num_tokens, bucket)
    past = round_up(num_past, max(KV_BUCKET, (1 << (num_past - 1).bit_length()) // 4)) if num_past else 0
    most = _PREFILL_TOKENS // length
    return PrefillShape(max(1, min(most, _PAST_TOKENS // (past + length)) if past else most), length, past)


class Network:
    """A model with its slots and attention masks."""

    def __init__(
        self, model: PreTrainedModel, slots: int, max_context_tokens: int, *, attends_by_row: bool = False
    ) -> None:
        """Allocate the slots. Raises UserError for a model that does not work with this KV cache. `attends_by_row`:
        whether each row attends only over its own length (`row_attention.py`); a decode step then always receives the
        whole cache."""
        self._attends_by_row = attends_by_row
        self._attends_by_class = model.device.type == "cpu" and not attends_by_row and can_attend_by_class(model)
        if attends_by_row or self._attends_by_class:
            attend_by_row(model)
        if attends_by_row and model.device.type == "cpu" and model.dtype == torch.bfloat16:
            replace_norms(model)
        self.model = model.requires_grad_(False)
        self.model.train(False)
        self.device: torch.device = model.device
        self.vocabulary = int(model.config.get_text_config().vocab_size)
        self._max_context_tokens = max_context_tokens
        limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        if limit is not None and max_context_tokens > limit:
            raise UserError(
                f"engine.max_context_tokens: got {max_context_tokens}, allowed are at most {limit}, the limit of the "
                "model (max_position_embeddings)"
            )
        self._masks: Masks = masks_for(model.config, max_context_tokens, model.dtype)
        self._packed = PackedLinears(model)
        self._body: Module = model.base_model
        """The model without its head, because prefill needs no logits."""
        self._base = BaseWeights()
        self._shapes: dict[Parameter, torch.Size] = {}
        """Shapes of the weights that `sleep` has freed. While this dict is not empty, an adapter cannot be loaded."""
        self._is_whole = False
        """Whether the last loaded version was a whole model instead of an adapter."""
        self.is_resting = False
        self._width = max(MIN_WIDTH, slots)
        self.widths: tuple[int, ...] = ()
        """Batch sizes at which a decode step gives bit-identical results, ascending. The last one covers all slots."""
        self.kv_lengths: tuple[int, ...] = ()
        """KV lengths, in ascending order, at which a decode step gives bit-identical results. The last one is the cache
        length."""
        self.classes: LengthClasses | None = None
        """Classes of rows that attend over different lengths. None: all rows attend over the same length."""
        self.prefill_rows: dict[PrefillShape, tuple[int, ...]] = {}
        """Prefill shape → batch sizes, in ascending order, at which this prefill gives bit-identical results."""
        self.cache = self._proven_cache()

    def prefill(self, ids: Sequence[Sequence[int]], pasts: Sequence[Sequence[Prefix]] = ()) -> list[Prefix]:
        """Compute the keys and values of up to `PrefillShape.rows` sequences that all have the same `prefill_shape`.
        `pasts`: for each sequence, the keys and values of the ids before it; empty if all begin at position 0."""
        shape = prefill_shape(len(ids[0]), sum(piece.num_tokens for piece in pasts[0]) if pasts else 0)
        assert len(ids) <= shape.rows, f"cannot prefill {len(ids)} sequences in {shape.rows} rows"
        if shape not in self.prefill_rows:
            self.prefill_rows[shape] = self._same_rows(shape)
        rows = next(rows for rows in self.prefill_rows[shape] if rows >= len(ids))
        return self._prefill(ids, shape._replace(rows=rows), pasts)

    def _prefill(
        self, ids: Sequence[Sequence[int]], shape: PrefillShape, pasts: Sequence[Sequence[Prefix]]
    ) -> list[Prefix]:
        rows, length, past = shape
        padded = [[*row, *[0] * (length - len(row))] for row in ids] + [[0] * length] * (rows - len(ids))
        ids_RL = torch.tensor(padded, device=self.device)
        query_RL = torch.arange(length, device=self.device)[None]
        kv_RK = None
        if past:
            begins = [sum(piece.num_tokens for piece in pieces) for pieces in pasts] + [past] * (rows - len(pasts))
            begin_R1 = torch.tensor(begins, device=self.device)[:, None]
            query_RL = begin_R1 + query_RL
            past_P = torch.arange(past, device=self.device)
            kv_RK = torch.cat((torch.where(past_P < begin_R1, past_P, _NOWHERE), query_RL), 1)
        with torch.inference_mode():
            cache = prefill_cache(pasts, rows, past)
            for begin in range(0, length, _MASKED_TOKENS):
                end = min(begin + _MASKED_TOKENS, length)
                query_RQ = query_RL[:, begin:end]
                kv = end if kv_RK is None else kv_RK[:, None, None, : past + end]
                self._body(
                    input_ids=ids_RL[:, begin:end],
                    attention_mask=self._masks.additive(query_RQ[:, None, :, None], kv),
                    position_ids=query_RQ.clamp(max=self._max_context_tokens - 1).expand(rows, end - begin),
                    past_key_values=cache,
                    use_cache=True,
                )
            return prefixes(cache, past, [len(row) for row in ids])

    def decode(self, ids_W: Tensor, position_W: Tensor, kv_length: int) -> Tensor:
        """Run the model on one id for each of the lowest W slots, and return the logits [W, V]. `position_W`: position
        of each id in its slot. `kv_length`: number of positions to scan; classes of shorter rows scan fewer."""
        classes = self.classes
        ranges = classes.ranges(position_W.numpy() + 1) if classes is not None and classes.ends else ()
        return self.decode_ranges(ids_W, position_W, kv_length, ranges)

    def decode_ranges(
        self, ids_W: Tensor, position_W: Tensor, kv_length: int, ranges: Sequence[SlotRange] = ()
    ) -> Tensor:
        """Decode in the given ranges of slots. Without ranges, or with attention by row, all slots are one range."""
        with torch.inference_mode():
            self.cache.focus(len(ids_W), kv_length, position_W)
            rows = Rows.of(position_W, kv_length) if self._attends_by_row else ranges
            output = self.model(
                **({"rows": rows} if rows else {}),
                input_ids=ids_W[:, None],
                attention_mask=self._masks.additive(position_W[:, None, None, None], kv_length),
                position_ids=position_W[:, None],
                past_key_values=self.cache,
                use_cache=True,
            )
            logits: Tensor = output.logits[:, -1]
            return logits

    def order(self, position_W: Ints) -> Ints | None:
        """Return the order of rows that makes decode steps faster (`LengthClasses.order`); None if no row moves."""
        return None if self.classes is None else self.classes.order(position_W + 1)

    def load(self, tensors: Mapping[str, Any]) -> None:
        """Load a version (`load_version`). Raises EngineFault also for an adapter whose base `sleep` has freed."""
        if self._shapes and is_adapter(tensors):
            raise EngineFault("cannot load an adapter: the engine has freed its weights and needs a whole version")
        self._is_whole = load_version(self.model, self._base, tensors)
        self._shapes.clear()
        self._packed.refresh()

    @property
    def held_bytes(self) -> int:
        weights = (*self.model.parameters(), *self.model.buffers(), *self._base.tensors)
        return held_bytes((*weights, *self.cache.tensors), self.device) + self._packed.held_bytes

    def sleep(self) -> None:
        """Free the device memory of slots and weights. May be called twice. If the last version was a whole model, its
        weights are freed, because the next version replaces them. If the last version was an adapter, the base weights
        move to host memory."""
        if self.is_resting:
            return
        self.is_resting = True
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
            torch.cuda.empty_cache()  # the trainer allocates blocks of other sizes, which cached blocks cannot serve

    def wake_up(self) -> None:
        """Allocate slots and weights again. `load` must follow. May be called twice."""
        if not self.is_resting:
            return
        self.is_resting = False
        for parameter in self.model.parameters():
            if parameter in self._shapes:
                parameter.data = torch.empty(self._shapes[parameter], dtype=parameter.dtype, device=self.device)
            else:
                parameter.data = parameter.data.to(self.device)
        self.cache.allocate()

    def _proven_cache(self) -> SlotCache:
        try:
            cache, difference = self._probe()
        except (RuntimeError, TypeError, ValueError, AttributeError, LookupError) as error:
            raise UserError(
                f"model.path: the embedded engine does not support {self.model.config.model_type!r}, whose forward "
                f"does not work with the engine's KV cache ({type(error).__name__}: {first_line(error)}); "
                "docs/support.md lists the supported models"
            ) from error
        allowed = 0.2 if self.model.dtype == torch.bfloat16 else 1e-3
        if not difference <= allowed:
            raise UserError(
                f"model.path: the embedded engine does not support {self.model.config.model_type!r}: with the engine's "
                f"KV cache the logits differ from those of the plain forward by {difference:.2g} (relative), allowed "
                f"is {allowed}; docs/support.md lists the supported models"
            )
        return cache

    def _probe(self) -> tuple[SlotCache, float]:
        """Allocate the slots. Return the slots, and the relative difference between the logits of `decode` and those of
        a plain forward pass. The test ids are longer than the longest sliding window if the context allows it."""
        windows = [w for w in self._masks.windows.values() if w is not None]
        length = min(max([*windows, 0]) + 12, self._max_context_tokens)
        ids = [(7 * i + 1) % self.vocabulary for i in range(length)]
        with torch.inference_mode():
            plain = self.model(input_ids=torch.tensor([ids], device=self.device), use_cache=False)
            expected_V = plain.logits[0, -1].float()
            prefix = self.prefill([ids[:-1]])[0]
            if not prefix.tensors:
                raise ValueError("the forward does not write keys and values into the cache that it receives")
            self.cache = SlotCache(prefix, self._width, self._max_context_tokens)
            self.cache.write(0, prefix)
            ids_W = torch.full((self._width,), ids[-1], device=self.device)
            got_V = self.decode(ids_W, torch.full_like(ids_W, length - 1), self.cache.length)[0].float()
            self.widths, self.kv_lengths = self._same_shapes(prefix)
            self.classes = self._same_classes()
            scale = expected_V.norm().clamp_min(1e-30)
            return self.cache, float((got_V - expected_V).norm() / scale)

    def _same_rows(self, shape: PrefillShape) -> tuple[int, ...]:
        """Return the batch sizes, ascending, at which a prefill has the same bits as with `shape.rows` rows."""
        most, length, past = shape
        generator = torch.Generator().manual_seed(0)
        limit = min(length, self._max_context_tokens)
        ids = torch.randint(self.vocabulary, (most, limit), generator=generator).tolist()
        halves = [most >> i for i in range(1, 5)] if self.device.type == "cpu" else []
        fewer = [rows for rows in halves if rows and rows * length >= _MIN_PREFILL_TOKENS]
        if not fewer:
            return (most,)
        pasts = [[_noise(self.cache.read(0, 0, 1), past)]] * most if past else []
        full = self._prefill(ids, shape, pasts)

        def is_same(rows: int) -> bool:
            found = self._prefill(ids[:rows], shape._replace(rows=rows), pasts[:rows])
            return all(all(map(torch.equal, a.tensors, b.tensors)) for a, b in zip(found, full, strict=False))

        return (*(rows for rows in reversed(fewer) if is_same(rows)), most)

    def _same_shapes(self, like: Prefix) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return, in ascending order, the batch sizes and the KV lengths at which the results of a decode step are
        bit-identical to those at the largest batch size and KV length. For the comparison, every position of every slot
        is filled with noise. On CUDA only the full batch size is used, because a smaller one saves almost no time."""
        full = self.cache.length
        noise = _noise(like, full)
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

    def _same_classes(self) -> LengthClasses | None:
        """Return the classes of rows. Return None if classes change bits of the result, or if the model does not pass
        slot ranges to its attention. The slots must hold noise."""
        width, lengths = self._width, [n for n in self.kv_lengths if n <= self._max_context_tokens]
        if not self._attends_by_class or len(lengths) < 2:
            return None
        length_W = [lengths[i * len(lengths) // width] for i in range(width)]
        ids_W, position_W = torch.arange(width) % self.vocabulary, torch.tensor(length_W) - 1
        full_WV = self.decode_ranges(ids_W, position_W, self.cache.length)
        too_short = [SlotRange(0, width, lengths[0])]
        if torch.equal(self.decode_ranges(ids_W, position_W, self.cache.length, too_short), full_WV):
            return None
        for ends in ((1,), (width // 2,), (width - 1,), (width // 3, width // 2)):
            ranges = [SlotRange(b, e, length_W[e - 1]) for b, e in pairwise((0, *ends, width))]
            if not torch.equal(self.decode_ranges(ids_W, position_W, self.cache.length, ranges), full_WV):
                return None
        return LengthClasses(self.kv_lengths, self.cache.tensors[0].shape[2:].numel())


def _noise(like: Prefix, num_tokens: int) -> Prefix:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn((num_tokens, *t.shape[1:]), generator=generator).to(t) for t in like.tensors]
    return Prefix(tensors, num_tokens)


def _widths(full: int) -> list[int]:
    """Return the candidate widths below `full`: multiples of 8 up to 64, then 80, 96, 112, 128, 160, 192 and so on."""
    doublings = [64 << i for i in range(full.bit_length())]
    tried = [*range(MIN_WIDTH, 64, 8), *[d + d // 4 * quarter for d in doublings for quarter in range(4)]]
    return [w for w in tried if w < full]


def _kv_lengths(full: int) -> list[int]:
    """Return the candidate lengths below `full`: multiples of 16, 32 or 64 up to 512, then 768, 1024, 1536, 2048 and so
    on."""
    step = next((step for step in (16, 32) if full <= 16 * step), KV_BUCKET)
    doublings = [512 << i for i in range(full.bit_length())]
    return [n for n in (*range(step, 512, step), *[n for d in doublings for n in (d, d + d // 2)]) if n < full]

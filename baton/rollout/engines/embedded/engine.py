"""`EmbeddedEngine`: continuous batching in torch for any Hugging Face causal LM, with the same code on CPU and CUDA.

    step:  report aborts ─▶ fill free slots (prefill missing pieces) ─▶ decode one token per row ─▶ report

**Only decode steps sample tokens.** Prefill computes no logits, only the keys and values of all ids except the last
one. The last id is the first input of decode. New prompts, shared prompts and resumed trajectories use the same code.

**Keys and values are kept** for later turns and resumes, in pieces (`slot_table.py: pieces_of`). The keys and values of
a piece are computed by one prefill, which reads the pieces before it. If a piece is computed again, on this or another
engine, its keys and values therefore have the same bits. There is one exception: if a trajectory was aborted within a
turn, the keys and values of its last piece may come from decode steps.

**A row does not depend on other rows.** On a CPU with one torch thread, the tokens and logprobs of a trajectory are
bit-identical in any slot and any batch, which tests verify. `network.py` chooses shapes that guarantee bit-identical
results.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from baton.cost.memory import KEPT_CONTEXTS
from baton.errors import UserError
from baton.policy.load import end_ids, load_policy, load_skeleton, torch_device, torch_dtype
from baton.policy.memory import held_bytes, sent
from baton.policy.routing import Routing, RoutingReplay
from baton.policy.settings import ModelSettings
from baton.policy.tokenizer import Tokenizer, load_tokenizer
from baton.rollout.engine import EngineSettings
from baton.rollout.engines.embedded.cache import KeptPrefixes
from baton.rollout.engines.embedded.length_classes import HORIZON_STEPS
from baton.rollout.engines.embedded.network import Network, PrefillShape, prefill_shape
from baton.rollout.engines.sampling import RowParams, noise_key, row_params, sample, uniforms
from baton.rollout.engines.slot_table import Piece, PrefixKey, RunningLease, SlotEngine, prefix_keys
from baton.types import FromWorker, PolicyVersion

_LOOK_AHEAD = 64
"""Maximum number of waiting leases, oldest first, whose prefixes are computed in the unused rows of a prefill."""


class EmbeddedEngine(SlotEngine):
    """An `Engine` that owns a model in this process."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Tokenizer,
        settings: EngineSettings,
        version: PolicyVersion,
        end_ids: tuple[int, ...],
    ) -> None:
        """Allocate the slots on the device of the model. `model`: must have the dtype `settings.dtype`. The engine owns
        the model, because `load_weights` overwrites the model's parameters. `end_ids`: ids that end a trajectory, in
        addition to the stop_token_ids of a lease. Raises UserError for a model without an ordinary KV cache."""
        dtype = str(model.dtype).removeprefix("torch.")
        assert settings.dtype in (dtype, "auto"), f"got a model in {dtype} with engine.dtype {settings.dtype}"
        super().__init__(settings, version, end_ids, lambda ids: tokenizer.text(ids, keep_special=True))
        self._routers = RoutingReplay(model) if settings.report_routing else None
        self.network = Network(
            model, settings.slots, settings.max_context_tokens, attends_by_row=settings.row_attention
        )
        self._kept = KeptPrefixes()
        self._context_tokens = settings.max_context_tokens
        self._is_in_flight = False
        """Whether any lease that has started since the last load of weights accepts newer versions. If so, the next
        load keeps the present keys and values, because such a lease may continue to use them."""
        self._inputs = np.zeros((3, self.network.widths[-1]), dtype=np.int64)
        """[3, slots] Input id of the next decode step, position of this id, and number of response tokens, per row."""
        self._noise_keys = np.zeros(self.network.widths[-1], dtype=np.uint64)
        """[slots] `noise_key` of each row's trajectory."""
        self._params, self._params_rows = RowParams(), list[RunningLease | None]()
        """Sampling parameters of the rows in the last decode step, and these rows."""
        self._needs_version = False
        """Whether the engine has slept since the last load of weights."""

    def load_weights(self, tensors: Mapping[str, Any], version: PolicyVersion) -> None:
        """Switch to new weights as `Engine.load_weights` describes; running leases keep their KV cache. Keys and values
        outside the slots are discarded, unless a lease that has started since the last load accepts newer versions.
        Raises EngineFault, without changing any weight, for tensors that do not fit."""
        assert not self.network.is_resting, "weights cannot be loaded into a sleeping engine: call wake_up first"
        self.network.load(tensors)
        self._needs_version = False
        if not self._is_in_flight or self.version.lineage != version.lineage or self.version.number >= version.number:
            self._kept.clear()
        self._is_in_flight = False
        self._table.switch(version)

    @property
    def held_bytes(self) -> int:
        """Number of bytes of device memory for weights, slots and kept prefixes."""
        return self.network.held_bytes + held_bytes(self._kept.tensors, self.network.device)

    def sleep(self) -> None:
        """Free the device memory of slots and weights. No lease may be waiting or running. May be called twice."""
        left = self._table.num_running + len(self._table.waiting())
        assert not left, f"the engine cannot sleep with {left} leases"
        self._kept.clear()
        self._needs_version = True
        self.network.sleep()

    def wake_up(self) -> None:
        """Allocate the device memory again. `load_weights` must follow. May be called twice."""
        self.network.wake_up()

    def step(self) -> list[FromWorker]:
        self._keep_aborted()
        reports = self._table.open_step()
        admitted = self._table.admit()
        assert not (admitted and self._needs_version), "an engine that has slept needs weights before it can generate"
        if admitted:
            self._fill_prefixes(admitted)
        if self._table.num_running:
            reports += self._decode()
        return reports

    def _fill_prefixes(self, admitted: list[tuple[int, RunningLease]]) -> None:
        """Write the prefix of each new row into its slot. Prefill the pieces that are not kept."""
        chains = [self._pieces(row) for _, row in admitted]
        waiting: list[tuple[PrefixKey, ...]] | None = None
        while missing := self._missing(chains):
            if waiting is None:
                waiting = [self._pieces(row) for row in islice(self._table.waiting(), _LOOK_AHEAD)]
            ahead_of = self._missing(waiting)
            for shape, wanted in missing.items():
                if unused := -len(wanted) % shape.rows:
                    ahead = ahead_of.get(shape, {})
                    wanted |= dict(islice((one for one in ahead.items() if one[0] not in wanted), unused))
                items = list(wanted.items())
                for batch in (items[i : i + shape.rows] for i in range(0, len(items), shape.rows)):
                    pasts = [[self._kept[key] for key in past] for _, past in batch]
                    ids = [key.ids for key, _ in batch]
                    for (key, _), prefix in zip(batch, self.network.prefill(ids, pasts), strict=True):
                        self._kept.add(key, prefix)
                        self._prefilled_tokens += prefix.num_tokens
        with torch.inference_mode():
            for (slot, row), keys in zip(admitted, chains, strict=True):
                row.kept = keys
                self._kept.use(keys)
                for key in keys:
                    self.network.cache.write(slot, self._kept[key], key.begin)
                trajectory = row.lease.trajectory
                self._inputs[:, slot] = row.ids[-1], row.position, row.length
                self._noise_keys[slot] = noise_key(row.lease.noise_seed, trajectory.group_id, trajectory.sample_index)
                self._is_in_flight |= not row.lease.is_exact
        self._drop_kept()

    def _missing(
        self, chains: Iterable[tuple[PrefixKey, ...]]
    ) -> dict[PrefillShape, dict[PrefixKey, tuple[PrefixKey, ...]]]:
        """Return the pieces to prefill next: in each chain, the first piece that is not kept. The result is grouped by
        prefill shape, and maps each piece to the pieces before it. `chains`: the pieces of each row, in order."""
        found: dict[PrefillShape, dict[PrefixKey, tuple[PrefixKey, ...]]] = {}
        for keys in chains:
            if (depth := self._kept.depth(keys)) < len(keys):
                past, key = keys[:depth], keys[depth]
                found.setdefault(prefill_shape(len(key.ids), key.begin), {})[key] = past
        return found

    def _pieces(self, row: RunningLease) -> tuple[PrefixKey, ...]:
        """Return the pieces of a row's prefix. Each piece has the version that computes it, normally the current
        version. If a lease accepts newer versions, it may also use kept pieces that older versions computed. The lease
        uses the older pieces if more of them are kept than pieces of the current version."""
        number = self.version.number
        keys = row.prefix_keys(number)
        if not row.lease.is_exact and row.length:
            own = row.prefix_keys(number, is_own=True)
            depth = self._kept.depth(own)
            if depth > self._kept.depth(keys):
                rest = [key.piece._replace(version=number) for key in own[depth:]]
                return (*own[:depth], *prefix_keys(rest, row.prefix_ids, own[depth - 1]))
        return keys

    def _keep_aborted(self) -> None:
        """Keep the keys and values of aborted rows up to `_kept_limit`, for resumed trajectories."""
        copied = 0
        for slot, row in self._table.aborted():
            begun = [key for key in row.kept if not key.piece.is_within_turn]
            start = begun[-1].piece.end if begun else 0
            is_current = row.last_version == self.version.number or not row.lease.is_exact
            copied += row.position - start
            is_grown = row.position > len(row.prefix_ids)
            if is_grown and is_current and copied <= self._kept_limit and self._kept.depth(begun) == len(begun):
                piece = Piece(row.position, row.last_version, is_within_turn=True)
                (key,) = prefix_keys([piece], tuple(row.ids[:-1]), begun[-1] if begun else None)
                with torch.inference_mode():
                    self._kept.add(key, self.network.cache.read(slot, start, row.position))
                self._kept.use((*begun, key))
        if copied:
            self._drop_kept()

    @property
    def _kept_limit(self) -> int:
        """Maximum number of tokens whose keys and values are kept outside the slots: the maximum context length times a
        factor. On a GPU, the factor is `KEPT_CONTEXTS`. On a CPU, the factor is the largest of `KEPT_CONTEXTS`, half
        the number of slots, and the number of free slots, so the limit decreases when leases take slots."""
        contexts = KEPT_CONTEXTS
        if self.network.device.type == "cpu":
            contexts = max(contexts, self.slots // 2, self.slots - self._table.num_running)
        return contexts * self._context_tokens

    def _drop_kept(self) -> None:
        """Drop the least recently used pieces until the others fit into `_kept_limit`. Pieces that no lease uses are
        dropped first, then pieces of running leases, then pieces of waiting leases."""
        if self._kept.num_tokens > (limit := self._kept_limit):
            for _, row in self._table.running():
                self._kept.use(row.kept)
            for row in reversed(self._table.waiting()):
                self._kept.use(self._pieces(row))
            self._kept.drop_oldest(limit)

    def _decode(self) -> list[FromWorker]:
        table, device = self._table, self.network.device
        width = next(w for w in self.network.widths if w >= table.num_running)
        if any(row is not None for row in table.rows[width:]):
            self._compact(width)
        is_ordering = self._decode_steps % HORIZON_STEPS == 0
        if is_ordering or table.rows[:width] != self._params_rows:
            self._order_rows(width, is_ordering=is_ordering)
            self._params_rows = table.rows[:width]
            params = [None if row is None else row.lease.sampling for row in self._params_rows]
            params += [None] * (width - len(params))
            self._params = row_params(params, self.network.vocabulary, device)
        inputs = self._inputs[:, :width]
        num_positions = int(inputs[1].max()) + 1
        kv_length = next(n for n in self.network.kv_lengths if n >= num_positions)
        inputs_W = sent(torch.from_numpy(inputs[:2].copy()), device)
        recorded: AbstractContextManager[Routing] = (
            nullcontext({}) if self._routers is None else self._routers.recorded()
        )
        with torch.inference_mode():
            with recorded as chosen:
                logits_WV = self.network.decode(inputs_W[0], inputs_W[1], kv_length)
            uniform_W = uniforms(self._noise_keys[:width], inputs[2])
            ids_W, logprob_W, masks = sample(logits_WV, self._params, uniform_W)
            drawn = torch.stack((ids_W.double(), logprob_W.double())).cpu().numpy()
        ids = drawn[0].astype(np.int64)
        inputs[0] = ids
        inputs[1:] += 1
        self._decode_steps += 1
        self._decode_rows += width
        self._decoded_tokens += table.num_running
        routing = None if self._routers is None else self._routers.as_bytes(chosen)
        return table.commit(ids.tolist(), drawn[1].tolist(), routing, masks)

    def _order_rows(self, width: int, *, is_ordering: bool) -> None:
        """Reset empty rows to position 0, because decode steps advance the positions of empty rows too. Without the
        reset, an empty row could have the largest position and determine how many positions a step scans. With
        `is_ordering`, also move rows of similar length into adjacent slots if this saves time."""
        rows = self._table.rows[:width]
        self._inputs[:, len(rows) : width] = 0
        self._inputs[:, [slot for slot, row in enumerate(rows) if row is None]] = 0
        position_W = self._inputs[1, : len(rows)]
        order = self.network.order(position_W) if is_ordering else None
        if order is not None:
            with torch.inference_mode():
                self.network.cache.reorder(order.tolist(), position_W.tolist())
            self._table.reorder(order.tolist())
            self._inputs[:, : len(order)] = self._inputs[:, order]
            self._noise_keys[: len(order)] = self._noise_keys[order]

    def _compact(self, width: int) -> None:
        """Move all rows, with their keys and values, into the lowest slots."""
        with torch.inference_mode():
            for source, destination in self._table.compact(width):
                row = self._table.rows[destination]
                assert row is not None
                self.network.cache.move(source, destination, row.position)
                self._inputs[:, destination] = self._inputs[:, source]
                self._noise_keys[destination] = self._noise_keys[source]


def embedded_engine(source: ModelSettings, settings: EngineSettings, version: PolicyVersion) -> EmbeddedEngine:
    """Build an engine with the weights of a model, which is `version`."""
    model, tokenizer = load_policy(source, settings.dtype), load_tokenizer(source.path)
    return EmbeddedEngine(model, tokenizer, settings, version, end_ids(model, tokenizer))


def skeleton_engine(
    directory: Path, base: Mapping[str, Any] | None, settings: EngineSettings, *, device: str, attention: str
) -> EmbeddedEngine:
    """Build an engine as `factory.engine_from_skeleton` does."""
    place = torch_device(device)
    model = load_skeleton(directory, dtype=torch_dtype(settings.dtype, place), device=place, attention=attention)
    if base is not None:
        missing, unexpected = model.load_state_dict(dict(base), strict=False)
        tied = set(getattr(model, "all_tied_weights_keys", {}))
        if unexpected or set(missing) - tied:
            raise UserError(
                "the tensors of the base model do not fit its configuration (unexpected or missing: "
                f"{', '.join([*unexpected, *missing][:3])}); check that model.path is the model of the run"
            )
    tokenizer = load_tokenizer(str(directory))
    return EmbeddedEngine(model, tokenizer, settings, PolicyVersion("", -1), end_ids(model, tokenizer))

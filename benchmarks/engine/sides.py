"""What is compared: Baton's embedded engine, the bare forwards it took, and two ways of transformers.

Each side serves all requests once per call of `run` and says how long that took. Models are loaded and warmed up
before. Every token is sampled at temperature 1 from the whole vocabulary, no id ends a response, and only the tokens
that were asked for are counted.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from workload import LONGEST_TOKENS, PROMPT_TOKENS, Request, load, tokenizer

from baton.rollout.engine import EngineSettings
from baton.rollout.engines.embedded.cache import prefill_cache
from baton.rollout.engines.embedded.engine import EmbeddedEngine
from baton.types import Lease, PolicyVersion, Report, SamplingParams, Trajectory

SLOTS = 64
CONTEXT_TOKENS = 192


@dataclass(slots=True)
class Timing:
    """One pass over the requests."""

    wall_s: float
    cpu_s: float
    """Of the whole process: what the wall time would be on an idle machine."""
    prefill_s: float | None = None
    """Part of `cpu_s`; None where prefill and decode cannot be told apart."""
    facts: dict[str, Any] = field(default_factory=dict)


@contextmanager
def stopwatch() -> Iterator[Timing]:
    """Time a context."""
    timing = Timing(0.0, 0.0)
    wall, cpu = time.perf_counter(), time.process_time()
    yield timing
    timing.wall_s, timing.cpu_s = time.perf_counter() - wall, time.process_time() - cpu


class Baton:
    """The embedded engine, driven as its port drives it; and the bare forwards of the last pass."""

    def __init__(self, directory: Path, dtype: str, *, row_attention: bool = False) -> None:
        begin = time.perf_counter()
        settings = EngineSettings(
            slots=SLOTS, max_context_tokens=CONTEXT_TOKENS, dtype=dtype, row_attention=row_attention
        )
        model = load(directory, getattr(torch, dtype))
        self.engine = EmbeddedEngine(model, tokenizer(), settings, PolicyVersion("benchmark", 0), ())
        self.start_s = time.perf_counter() - begin
        self.steps: list[tuple[int, int]] = []
        """(rows, positions) of each decode forward of the last pass."""
        self._prefills: list[tuple[int, int]] = []
        """(rows, length) of each prefill forward of the last pass."""
        self._prefill_s = 0.0
        self._next_lease = 0
        self._watch()

    def run(self, requests: Sequence[Request]) -> Timing:
        """Submit everything, and step until all have finished."""
        self.steps, self._prefills, self._prefill_s = [], [], 0.0
        first = self._next_lease
        self._next_lease += len(requests)
        leases = [
            Lease(
                first + i, Trajectory(first + i, 0, request.prompt_ids), SamplingParams(request.num_tokens), 7, 0, True
            )
            for i, request in enumerate(requests)
        ]
        before, tokens = self.engine.stats, 0
        with stopwatch() as timing:
            for lease in leases:
                self.engine.submit(lease)
            open_leases = len(leases)
            while open_leases:
                for report in self.engine.step():
                    assert isinstance(report, Report)
                    tokens += sum(len(segment.token_ids) for segment in report.segments)
                    open_leases -= report.finish_reason is not None
        assert tokens == sum(request.num_tokens for request in requests)
        after = self.engine.stats
        timing.prefill_s = self._prefill_s
        timing.facts = {
            "decode_steps": after.decode_steps - before.decode_steps,
            "occupancy": tokens / (after.decode_rows - before.decode_rows),
            "prefilled_tokens": after.prefilled_tokens - before.prefilled_tokens,
            "prefill_places": sum(rows * length for rows, length in self._prefills),
            "widths_possible": list(self.engine.network.widths),
            "widths_taken": {str(w): n for w, n in sorted(Counter(w for w, _ in self.steps).items())},
        }
        return timing

    def bare_decode(self) -> Timing:
        """The decode forwards of the last pass, all inputs made beforehand and all outputs thrown away."""
        network = self.engine.network
        inputs = {}
        for width, positions in set(self.steps):
            at_W = torch.full((width,), positions - 1)
            inputs[width, positions] = (
                torch.zeros((width, 1), dtype=torch.long),
                network._masks.additive(at_W[:, None, None, None], positions),
                at_W,
            )
        with torch.inference_mode(), stopwatch() as timing:
            for shape in self.steps:
                ids_W1, mask, at_W = inputs[shape]
                network.cache.focus(*shape, at_W)
                network.model(
                    input_ids=ids_W1,
                    attention_mask=mask,
                    position_ids=at_W[:, None],
                    past_key_values=network.cache,
                    use_cache=True,
                )
        return timing

    def bare_prefill(self) -> Timing:
        """The prefill forwards of the last pass, likewise."""
        network = self.engine.network
        inputs = {}
        for rows, length in set(self._prefills):
            at_Q = torch.arange(length)
            mask = network._masks.additive(at_Q[None, None, :, None], length)
            inputs[rows, length] = (torch.zeros((rows, length), dtype=torch.long), mask, at_Q.expand(rows, length))
        with torch.inference_mode(), stopwatch() as timing:
            for shape in self._prefills:
                ids_BQ, mask, at_BQ = inputs[shape]
                network._body(
                    input_ids=ids_BQ,
                    attention_mask=mask,
                    position_ids=at_BQ,
                    past_key_values=prefill_cache(),
                    use_cache=True,
                )
        return timing

    def _watch(self) -> None:
        """Note the shape of every forward and the time of every prefill."""
        network = self.engine.network
        decode, prefill = network.decode, network.prefill
        forward: Callable[..., Any] = network._body.forward

        def noted_decode(ids_W: Any, position_W: Any, kv_length: int) -> Any:
            self.steps.append((len(ids_W), kv_length))
            return decode(ids_W, position_W, kv_length)

        def noted_prefill(*args: Any) -> Any:
            begin = time.process_time()
            network._body.forward = noted_forward
            try:
                return prefill(*args)
            finally:
                network._body.forward = forward
                self._prefill_s += time.process_time() - begin

        def noted_forward(**inputs: Any) -> Any:
            self._prefills.append(tuple(inputs["input_ids"].shape))
            return forward(**inputs)

        network.decode, network.prefill = noted_decode, noted_prefill


class Generate:
    """`generate` in batches of as many rows as the engine has slots; each runs until its longest has finished."""

    def __init__(self, directory: Path, dtype: str) -> None:
        self._model = load(directory, getattr(torch, dtype))

    def run(self, requests: Sequence[Request]) -> Timing:
        """All requests in their order; `prefill_s` is the time of the same batches with one new token."""
        batches = [requests[i : i + SLOTS] for i in range(0, len(requests), SLOTS)]
        with stopwatch() as prefill:
            for batch in batches:
                self._generate(batch, 1)
        with stopwatch() as timing:
            for batch in batches:
                self._generate(batch, max(request.num_tokens for request in batch))
        timing.prefill_s = prefill.cpu_s
        return timing

    def _generate(self, batch: Sequence[Request], num_tokens: int) -> None:
        ids = torch.tensor([request.prompt_ids for request in batch])
        out = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert out.shape[1] == PROMPT_TOKENS + num_tokens


class ContinuousBatching:
    """transformers' own continuous batching, with as many requests at once as the engine has slots.

    Its default settings give a few hundred tokens per second on a CPU whatever the model; these are the best found.
    """

    PAGE_TOKENS = 16

    def __init__(self, directory: Path, dtype: str, batch_tokens: int) -> None:
        self._model = load(directory, getattr(torch, dtype))
        pages = SLOTS * -(-(PROMPT_TOKENS + LONGEST_TOKENS) // self.PAGE_TOKENS)
        self._settings = ContinuousBatchingConfig(
            page_size=self.PAGE_TOKENS,
            num_blocks=pages,
            max_batch_tokens=batch_tokens,
            max_requests_per_batch=SLOTS,
            allow_block_sharing=False,
        )
        self._generation = GenerationConfig(
            do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=-1, pad_token_id=0, max_new_tokens=1
        )

    def run(self, requests: Sequence[Request]) -> Timing:
        """Queue everything; the manager's thread generates."""
        tokens = 0
        with (
            self._model.continuous_batching_context_manager(
                generation_config=self._generation, continuous_batching_config=self._settings, timeout=60
            ) as manager,
            stopwatch() as timing,
        ):
            for request in requests:
                manager.add_request(list(request.prompt_ids), max_new_tokens=request.num_tokens, eos_token_id=-1)
            finished = 0
            while finished < len(requests):
                result = manager.get_result(timeout=60)
                assert result is not None, "continuous batching has stopped"
                assert result.error is None, result.error
                if result.is_finished():
                    finished += 1
                    tokens += len(result.generated_tokens)
        assert tokens == sum(request.num_tokens for request in requests), tokens
        return timing

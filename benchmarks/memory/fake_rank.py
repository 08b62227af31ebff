"""Measure the peak memory of one trainer rank on fake tensors: shapes and lifetimes of all tensors, no values.

    python -m benchmarks.memory.fake_rank OUTPUT.json [--only fit|check] [--models 1.7B 14B] [--first 1]

The rank runs the trainer's own code (`RankGroup`, `padded_scores`, AdamW) under torch's FakeTensorMode with the fake
process group. Optimiser moments and gradients exist before the measured microbatch, as in the last microbatch of an
update, and the update follows. Every storage that the rank's operators create is counted while it is alive.
"""

from __future__ import annotations

import argparse
import json
import time
import weakref
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

import baton.policy.head as head
from baton.cost.memory import RankShape, adapter_params, largest, rank_phases
from baton.policy.adapters import add_adapters
from baton.policy.head import RequestedScores
from baton.policy.logprobs import checkpoint_activations, compute_in, padded_scores
from baton.policy.settings import LoraSettings
from baton.trainer.algorithm import AlgorithmSettings
from baton.trainer.memory import spec_of
from baton.trainer.parallel.group import RankGroup, SingleRank
from baton.trainer.settings import TrainerSettings
from baton.trainer.update import make_learners
from benchmarks.machine import machine
from benchmarks.memory.cases import CASES, Case, config_of

if TYPE_CHECKING:
    from collections.abc import Iterator


class Peaks(NamedTuple):
    """Bytes of one rank."""

    state: int
    """Weights, gradients and moments between two microbatches."""
    forward: int
    kept: int
    """After the forward pass."""
    head: int
    """In the backward pass of the head."""
    blocks: int
    """In the backward pass after the head."""
    update: int

    @property
    def largest(self) -> int:
        return max(self)


class LiveStorages(TorchDispatchMode):
    """Counts the bytes of all storages that are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes: dict[int, tuple[weakref.ref[Any], int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for each in tree_leaves(found):
            if isinstance(each, torch.Tensor):
                self.watch(each)
        return found

    def watch(self, tensor: torch.Tensor) -> None:
        """Count a tensor's storage until it is freed."""
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        self.count(local.untyped_storage())

    def count(self, storage: Any) -> None:
        """Count a storage, which may have changed its size."""
        key, size = storage._cdata, storage.nbytes()
        known = self._sizes.get(key)
        if known is None:
            self._sizes[key] = weakref.ref(storage, lambda _, key=key: self._gone(key)), size
        else:
            self.now -= known[1]
            self._sizes[key] = known[0], size
        self.now += size
        self.peak = max(self.peak, self.now)

    def take_peak(self) -> int:
        """Return the peak since the last call."""
        found, self.peak = self.peak, self.now
        return found

    def _gone(self, key: int) -> None:
        self.now -= self._sizes.pop(key)[1]


@contextmanager
def resizes(live: LiveStorages) -> Iterator[None]:
    """Count the storages that FSDP frees and allocates again by resizing."""
    plain = torch.UntypedStorage.resize_

    def resize(storage: Any, size: int) -> Any:
        found = plain(storage, size)
        live.count(storage)
        return found

    torch.UntypedStorage.resize_ = resize
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = plain


@contextmanager
def ends_of_head(live: LiveStorages) -> Iterator[list[int]]:
    """Return a list, to which the head's backward pass appends its peak."""
    plain, found = head._HeadScores.backward, []

    def backward(*arguments: Any) -> Any:
        gradients = plain(*arguments)
        found.append(live.take_peak())
        return gradients

    head._HeadScores.backward = staticmethod(backward)
    try:
        yield found
    finally:
        head._HeadScores.backward = staticmethod(plain)


def add_product_on_cuda(total_VH: torch.Tensor, of_products: torch.Tensor, hidden: torch.Tensor) -> None:
    """Allocate what `head._add_product` allocates on CUDA, where the product is a tensor of its own."""
    if hidden.dtype is torch.float32:
        total_VH.addmm_(of_products.T, hidden)
    else:
        total_VH[: head.PRODUCT_ROWS] += torch.empty_like(total_VH[: head.PRODUCT_ROWS])


def measure(case: Case) -> Peaks:
    """Return the peak bytes of the rank that `case` describes."""
    device, dtype = torch.device("cpu"), getattr(torch, case.dtype)
    group = SingleRank()
    if case.ranks > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=case.ranks)
        values = {"ranks": case.ranks, "dtype": case.dtype, "shard_gradients": case.shard_gradients}
        group = RankGroup(device, TrainerSettings.model_validate(values))
    live = LiveStorages()
    with FakeTensorMode(allow_non_fake_inputs=True), resizes(live):
        held = dtype if case.lora else torch.float32  # a frozen base has the dtype in which it computes
        config = config_of(case.model)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=held).eval()
        if case.lora:
            with mock.patch.object(torch.nn.Module, "to", lambda self, *_, **__: self):  # fake weights cannot move
                add_adapters(model, LoraSettings(rank=case.lora), 0)
        if case.checkpointing:
            checkpoint_activations(model)
        linear = model.get_output_embeddings()
        model._baton_head = linear, head.Head(linear)  # the check of a head compares values
        group.shard(model)
        learner = make_learners(model, None, TrainerSettings(), AlgorithmSettings())[0]
        ids = torch.randint(1000, (case.tokens // case.row, case.row + 1))
        for parameter in model.parameters():
            live.watch(parameter)

        def forward() -> Any:
            with compute_in(dtype, device):
                wanted = RequestedScores(with_entropy=True)
                return group.run(model, lambda m: padded_scores(m, ids, first=1, wanted=wanted))

        with live, ends_of_head(live) as ends:
            for parameter in learner.parameters.values():
                parameter.grad = torch.zeros_like(parameter)
            learner.optimizer.step()
            if not case.shard_gradients:
                learner.optimizer.zero_grad()  # the shards of the last microbatch do not exist yet
                group.before_backward(is_last=False)
                forward().logprobs.sum().backward()
            state, _ = live.now, live.take_peak()
            scores = forward()
            of_forward, kept = live.take_peak(), live.now
            group.before_backward(is_last=True)
            scores.logprobs.sum().backward()
            del scores
            of_head, of_blocks = ends.pop(), live.take_peak()
            learner.optimizer.step()
            of_update = live.take_peak()
    if case.ranks > 1:
        dist.destroy_process_group()
    return Peaks(state, of_forward, kept, of_head, of_blocks, of_update)


def predict(case: Case) -> tuple[str, int]:
    """Return the phase with the peak and its bytes by the law, without the assumed part."""
    wide, model = getattr(torch, case.dtype).itemsize, spec_of(config_of(case.model))
    shape = RankShape(
        tokens=case.tokens,
        shards=case.ranks,
        value_bytes=wide,
        recomputes=case.checkpointing,
        whole_gradients=not case.shard_gradients,
        adapter_params=adapter_params(model, case.lora) if case.lora else 0.0,
        base_bytes=wide,
    )
    phase = largest(rank_phases(model, shape), model.num_layers)
    return phase.name, int(phase.bytes(model.num_layers))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--only", choices=["fit", "check"])
    parser.add_argument("--models", nargs="*")
    parser.add_argument("--first", type=int, default=len(CASES), metavar="N", help="measure the first N of these cases")
    options = parser.parse_args()
    head._add_product = add_product_on_cuda
    import transformers.models.qwen3.modeling_qwen3 as dense
    import transformers.models.qwen3_moe.modeling_qwen3_moe as sparse

    dense.create_causal_mask = sparse.create_causal_mask = lambda *_, **__: None  # a mask depends on values
    rows: list[dict[str, Any]] = []
    for case in CASES:
        if options.only not in (None, case.split) or (options.models and case.model not in options.models):
            continue
        if len(rows) == options.first:
            break
        begin = time.perf_counter()
        peaks = measure(case)
        phase, law = predict(case)
        found = {"peak": peaks.largest, "law": law, "law_phase": phase, "law_over_peak": round(law / peaks.largest, 4)}
        rows.append({**case._asdict(), "split": case.split, **peaks._asdict(), **found})
        print(
            f"{case} {peaks} law {law / 1e9:.2f} GB ({phase}), {law / peaks.largest:.3f} of the peak, "
            f"{time.perf_counter() - begin:.0f} s",
            flush=True,
        )
        options.output.write_text(
            json.dumps({"machine": machine(), "torch": torch.__version__, "rows": rows}, indent=1)
        )


if __name__ == "__main__":
    main()

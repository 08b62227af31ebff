"""Measure the peak memory of a rank of a pipeline stage on fake tensors, and compare it with the law.

    python -m benchmarks.memory.fake_stage OUTPUT.json

As `fake_rank.py`, for one update of six microbatches by 1F1B (`Pipeline.run`); messages to other stages have no effect.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM

import baton.policy.head as head
from baton.cost.memory import RankShape, largest, rank_phases
from baton.policy.head import RequestedScores
from baton.policy.logprobs import checkpoint_activations, compute_in, hidden_states, padded_scores
from baton.trainer.algorithm import AlgorithmSettings
from baton.trainer.memory import spec_of
from baton.trainer.parallel.group import RankGroup
from baton.trainer.parallel.schedule import stage_layers
from baton.trainer.settings import TrainerSettings
from baton.trainer.update import make_learners
from benchmarks.machine import machine
from benchmarks.memory.cases import config_of
from benchmarks.memory.fake_rank import LiveStorages, add_product_on_cuda, resizes

MICROBATCHES, ROW = 6, 2048


class Case(NamedTuple):
    """What one rank of a stage trains, and how."""

    model: str
    ranks: int
    stages: int
    stage: int
    tokens: int = 8192
    checkpointing: bool = True


CASES = [
    *[Case("1.7B", 4, 4, stage) for stage in (0, 1, 3)],
    *[Case("8B", 8, 4, stage) for stage in (0, 3)],
    Case("14B", 16, 2, 0),
]


def measure(case: Case) -> int:
    """Return the peak bytes of the first rank of the stage."""
    device, dtype, is_last = torch.device("cpu"), torch.bfloat16, case.stage == case.stages - 1
    rank = case.stage * case.ranks // case.stages
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=case.ranks)
    settings = TrainerSettings(ranks=case.ranks, dtype="bfloat16", stages=case.stages, shard_gradients=True)
    group = RankGroup(device, settings)
    live = LiveStorages()
    with FakeTensorMode(allow_non_fake_inputs=True), resizes(live):
        config = config_of(case.model)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32).eval()
        if case.checkpointing:
            checkpoint_activations(model)
        group.shard(model)
        if is_last:
            linear = model.get_output_embeddings()
            model._baton_head = linear, head.Head(linear)  # the check of a head compares values
        learner = make_learners(model, None, TrainerSettings(), AlgorithmSettings())[0]
        ids = torch.randint(1000, (case.tokens // ROW, ROW + 1))
        for parameter in model.parameters():
            live.watch(parameter)

        def compute(part: Any) -> torch.Tensor:
            if not is_last:
                return hidden_states(part, ids[:, :-1])
            return padded_scores(part, ids, first=1, wanted=RequestedScores(with_entropy=True)).logprobs.sum()

        def forward(_: int, arrived: torch.Tensor | None) -> torch.Tensor:
            with compute_in(dtype, device):
                return group.run(model, compute, arrived)

        def backward(place: int, output: torch.Tensor, gradient: torch.Tensor | None) -> None:
            group.before_backward(is_last=place == MICROBATCHES - 1)
            output.backward(gradient)

        with live:
            for parameter in learner.parameters.values():
                parameter.grad = torch.zeros_like(parameter)
            learner.optimizer.step()
            live.take_peak()
            shape = (case.tokens // ROW, ROW, config.hidden_size)
            group.pipeline.run([shape] * MICROBATCHES, MICROBATCHES, forward, backward)
            group.after_backward()
            learner.optimizer.step()
            peak = live.take_peak()
    dist.destroy_process_group()
    return peak


def predict(case: Case) -> tuple[str, int]:
    """Return the phase with the peak and its bytes by the law, without the assumed part."""
    model = spec_of(config_of(case.model))
    shape = RankShape(
        tokens=case.tokens, shards=case.ranks // case.stages, recomputes=case.checkpointing, is_stage=True
    )
    in_flight = min(case.stages - case.stage, MICROBATCHES)
    phases = rank_phases(model, shape, case.stage == 0, case.stage == case.stages - 1, in_flight)
    layers = stage_layers(case.stages, model.num_layers)[case.stage]
    phase = largest(phases, layers)
    return phase.name, int(phase.bytes(layers))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    output: Path = parser.parse_args().output
    head._add_product = add_product_on_cuda
    import transformers.models.qwen3.modeling_qwen3 as dense

    dense.create_causal_mask = lambda *_, **__: None  # a mask depends on values
    rows = []
    for case in CASES:
        peak, (phase, law) = measure(case), predict(case)
        rows.append({**case._asdict(), "peak": peak, "law": law, "law_phase": phase, "ratio": round(law / peak, 3)})
        print(rows[-1], flush=True)
    output.write_text(json.dumps({"machine": machine(), "torch": torch.__version__, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

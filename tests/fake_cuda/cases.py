"""What runs on the emulated device: train steps of every preset, and decode steps of the embedded engine.

`main` writes a JSON file that `tests/trainer/test_fake_cuda.py` reads. Keys of launches and waits are numbers of one
pass; "per layer" is half of the difference between models of four and of two layers.
"""

from __future__ import annotations

import json
import logging
import math
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from baton.policy.settings import LoraSettings
from baton.policy.threads import keep_positions_exact, set_up_threads
from baton.rollout.engine import EngineSettings
from baton.rollout.engines.embedded.engine import EmbeddedEngine
from baton.trainer.algorithm import PRESETS, AlgorithmSettings
from baton.trainer.microbatches import pad
from baton.trainer.samples import minibatches
from baton.types import Lease, PolicyVersion, SamplingParams, Trajectory, ends_lease
from baton.weights.direct.stream import OutgoingVersion
from baton.weights.direct.vllm_transport import VersionSource, VllmCommunicator
from tests.all_cases import ALL
from tests.fake_cuda.device import CUDA, LOG, Dispatch, install
from tests.trainer.trainer_cases import make_trainer, random_batch, tiny_model, tiny_tokenizer

BATCH = random_batch(1, num_groups=2)
ADAPTERS = LoraSettings(rank=4)
EXTRA: dict[str, dict[str, Any]] = {
    "several updates": {"num_minibatches": 2, "num_epochs": 2},
    "kl in the loss": {"kl_coef": 0.01},
    "kl in the reward": {"name": "reinforce_pp", "kl_coef": 0.01, "kl_in": "reward"},
    "entropy bonus": {"entropy_coef": 0.01},
    "second moment": {"correction": "second_moment"},
}
"""Settings of [algorithm] that add passes or operations."""


def names_of_steps(*, is_hip: bool) -> tuple[str, ...]:
    """Return the algorithms. ROCm lacks a product and an attention kernel, which every preset uses in the same way."""
    return (*PRESETS, *EXTRA) if ALL or not is_hip else ("grpo", *EXTRA)


def main(results: Path, *, is_hip: bool) -> None:
    """With `is_hip`, as a build for ROCm."""
    logging.disable()  # alarms: these batches have invented log-probabilities
    install(is_hip=is_hip)
    set_up_threads(1, deterministic=True)  # deterministic mode refuses operations; everything must run in it
    found: dict[str, Any] = {}
    with Dispatch():
        found["emulation"] = {name: tried(case) for name, case in CONTROLS.items()}
        found["steps"] = steps(names_of_steps(is_hip=is_hip))
        found["passes"] = {name: tried(partial(passes, **settings)) for name, settings in PASSES.items()}
        found["decode"] = tried(decode)
        found["staged"] = tried(staged)
        found["differences"] = tried(differences)
    results.write_text(json.dumps(found))


def tried(case: Callable[[], Any]) -> Any:
    """Return a case's result, or its error with the innermost lines that led there."""
    try:
        return case()
    except Exception as error:  # noqa: BLE001 - every failure is a result
        lines = "".join(traceback.format_tb(error.__traceback__)[-4:])
        return {"error": f"{type(error).__name__}: {error}"[:400], "where": lines}


def on_device(model: torch.nn.Module) -> Any:
    keep_positions_exact(model)
    return model.to("cuda")


class ProductRotaryEmbedding(torch.nn.Module):
    """Angles as a matrix product, as in releases of transformers before 5.23."""

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        return torch.ones(1, 1, device=positions.device) @ positions[None].float()


def rotary_error(*, is_kept_exact: bool) -> float:
    """Largest error of the rotary angles at positions below 5000."""
    rotary, positions = ProductRotaryEmbedding(), torch.arange(5000)
    if is_kept_exact:
        keep_positions_exact(rotary)
    found = rotary(positions.to("cuda"))
    assert torch.backends.cuda.matmul.allow_tf32
    return float((found.cpu() - positions).abs().max())


def tf32_error() -> float:
    product = torch.ones(1, 1, device="cuda") @ torch.tensor([[4097.0]], device="cuda")
    return abs(product.item() - 4097.0)


def indexed_writes() -> int:
    LOG.reset()
    torch.zeros(4, device="cuda").index_copy_(0, torch.tensor([1], device="cuda"), torch.ones(1, device="cuda"))
    return sum(LOG.slow.values())


CONTROLS: dict[str, Callable[[], Any]] = {
    "two devices": lambda: torch.ones(2, device="cuda") + torch.ones(2),
    "numpy": lambda: torch.ones(2, device="cuda").numpy(),
    "generator": lambda: torch.ones(2, device="cuda").uniform_(generator=torch.Generator()),
    "running sum": lambda: torch.ones(2, device="cuda").cumsum(0),
    "wide product": lambda: (
        torch.mm(*[torch.ones(2, 2, dtype=torch.bfloat16, device="cuda")] * 2, out_dtype=torch.float32).dtype.itemsize
    ),
    "indexed writes": indexed_writes,
    "tf32 error": tf32_error,
    "rotary error": lambda: rotary_error(is_kept_exact=False),
    "rotary error, kept exact": lambda: rotary_error(is_kept_exact=True),
}
"""Uses that CUDA refuses or rounds, by name: the emulated device must show each."""


def steps(names: Sequence[str]) -> dict[str, Any]:
    """Run a train step of each preset in every shape: packed or padded, recomputed or not, all weights or adapters. CI
    runs every second shape."""
    found, first = {}, names.index("grpo")
    kinds: dict[str, dict[str, Any]] = {name: EXTRA.get(name, {"name": name}) for name in names}
    for settings in kinds.values():  # the batch has two groups, and more updates run the same code
        settings["num_minibatches"] = min(2, AlgorithmSettings(**settings).num_minibatches)
        settings["num_epochs"] = min(2, AlgorithmSettings(**settings).num_epochs)
    shapes = list(product(("always", "never"), (False, True), (None, ADAPTERS)))
    for (index, (kind, algorithm)), (packing, recomputes, lora) in product(enumerate(kinds.items()), shapes):
        if not ALL and ((packing == "never") + recomputes + (lora is not None) + index + first) % 2:
            continue  # of each two of the three, all combinations are there

        def case(
            algorithm: dict[str, Any] = algorithm, lora: LoraSettings | None = lora, **settings: Any
        ) -> dict[str, Any]:
            needs_reference = AlgorithmSettings(**algorithm).kl_coef and lora is None
            reference = on_device(tiny_model(seed=3)).requires_grad_(False) if needs_reference else None
            trainer = make_trainer(on_device(tiny_model()), reference=reference, lora=lora, **settings, **algorithm)
            LOG.reset()
            metrics = trainer.step(BATCH)
            waits = dict(LOG.waits)
            weights = trainer.publish().tensors
            return {
                "is_finite": all(map(math.isfinite, metrics.values())),
                "is_packed": trainer.passes.is_packed,
                "moved": metrics["policy/grad_norm"] > 0,
                "devices": sorted({str(tensor.device) for tensor in weights.values()}),
                "waits": waits,
            }

        shape = f"{packing}, {'recomputed' if recomputes else 'kept'}, {'full' if lora is None else 'lora'}"
        found[f"{kind}: {shape}"] = tried(
            lambda case=case, packing=packing, recomputes=recomputes: case(
                packing=packing, activation_checkpointing=recomputes
            )
        )
    return found


PASSES: dict[str, dict[str, Any]] = {
    "packed": {"packing": "always"},
    "padded": {"packing": "never"},
    "packed, recomputed": {"packing": "always", "activation_checkpointing": True},
    "packed, lora": {"packing": "always", "lora": ADAPTERS},
}


def passes(**settings: Any) -> dict[str, Any]:
    """Count a forward and backward pass of one microbatch."""
    counts = []
    for layers in (2, 4):
        trainer = make_trainer(on_device(tiny_model(num_hidden_layers=layers)), **settings)
        rows = minibatches(BATCH, AlgorithmSettings(), oldest=0, longest=64)[0]
        inputs = pad(rows, CUDA, is_packed=settings["packing"] == "always").inputs
        LOG.reset()
        trainer.passes.scores(inputs, is_update=True).logprobs.sum().backward()
        counts.append((sum(LOG.launches.values()), dict(LOG.waits)))
    (few, _), (many, waits) = counts
    return {"launches_per_layer": (many - few) / 2, "waits": waits}


def decode() -> dict[str, Any]:
    """Count a decode step of 16 rows, and drain the engine with filtered sampling and new weights."""
    counts = []
    for layers in (2, 4):
        model = tiny_model(num_hidden_layers=layers).to(torch.bfloat16)
        settings = EngineSettings(slots=16, max_context_tokens=64)
        engine = EmbeddedEngine(on_device(model), tiny_tokenizer(), settings, PolicyVersion("x", 0), (1,))
        for number in range(16):
            trajectory = Trajectory(number // 4, number % 4, tuple(range(2, 12 + number % 4)))
            sampling = SamplingParams(12, 1.0, 0.9 if number % 2 else 1.0)
            engine.submit(Lease(number, trajectory, sampling, noise_seed=7, version=0))
        reports = [*engine.step()]
        LOG.reset()
        reports += engine.step()
        counts.append((sum(LOG.launches.values()), dict(LOG.waits), dict(LOG.copies), dict(LOG.slow)))
        for _ in range(20):
            reports += engine.step()
        weights = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
        engine.load_weights(weights, PolicyVersion("x", 1))
    (few, *_), (many, waits, copies, slow) = counts
    ended = sum(map(ends_lease, reports))
    return {"launches_per_layer": (many - few) / 2, "waits": waits, "copies": copies, "slow": slow, "ended": ended}


def staged() -> dict[str, Any]:
    """Send a sleeping trainer's tensors, which are on the host, to an engine on the same GPU."""
    source, found = VersionSource(), []

    def send_weights() -> None:
        found.append([(str(tensor.device), tensor.sum().item()) for _, tensor in source])

    communicator = VllmCommunicator(SimpleNamespace(send_weights=send_weights), None, source, 0)
    tensors = {"a": torch.ones(30), "b": torch.full((40,), 2.0)}
    buckets = OutgoingVersion(tensors, PolicyVersion("x", 1), bucket_bytes=200).buckets()
    communicator.send(buckets, lambda: found.append([]))
    return {"sent": found, "left": len(source.bucket.tensors)}


def differences() -> dict[str, Any]:
    """Find the difference of two versions on the device and on the host, as the trainer that sends it does."""
    old = {"a": torch.arange(1000.0).to(torch.bfloat16), "b": torch.zeros(3, 40), "same": torch.ones(7)}
    new = {name: tensor.clone() for name, tensor in old.items()}
    new["a"].view(torch.int16)[::100] ^= 1
    new["b"][1, 2] = 5.0

    def sent(device: str) -> tuple[list[Any], list[Any], list[str]]:
        before, after = ({name: tensor.to(device) for name, tensor in one.items()} for one in (old, new))
        base = OutgoingVersion(before, PolicyVersion("x", 1)).without_difference()
        buckets = OutgoingVersion(after, PolicyVersion("x", 2), base).buckets(base.version)
        tensors = [tensor for bucket in buckets for tensor in bucket.tensors]
        infos = [dict(bucket.info) for bucket in buckets]
        return infos, [one.tolist() for one in tensors], [str(one.device) for one in tensors]

    (infos, values, devices), (of_host, host_values, _) = sent("cuda"), sent("cpu")
    return {"is_equal": (infos, values) == (of_host, host_values), "devices": devices, "values": values}

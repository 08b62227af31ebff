"""Divide this machine's GPUs between the trainer and the engines that a run starts here.

    ranks ─▶ GPUs 0 to ranks - 1 (one rank: the GPU of `model.device`)
    engines ─▶ `engine.devices`; by default the GPUs that no rank uses, or all GPUs if these are too few
    reward models ─▶ `devices` of [[reward]]; by default a GPU without a rank or engine or, if there is none, a
    GPU of an engine

An engine in a separate process sees only its own GPUs: an environment variable of the CUDA or ROCm runtime hides the
others.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from baton.errors import UserError
from baton.recipe.recipe import Recipe
from baton.rewards.settings import RewardSettings
from baton.weights.direct.settings import DirectTransfer


@dataclass(frozen=True, slots=True)
class DeviceLayout:
    """The GPUs of a run on this machine, as indices among the visible GPUs."""

    trainer: tuple[int, ...]
    """The GPU of each rank."""
    engines: tuple[tuple[int, ...], ...]
    """The GPUs of each engine."""
    rewards: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """(name of the [[reward]] section, devices) of each reward model."""
    gpu_bytes: int = field(default=0, compare=False)
    """Total memory of a GPU; vLLM takes a share of it. 0 if the engines are not of kind `vllm`."""

    def __str__(self) -> str:
        trainer = [f"trainer rank {rank}: {gpu}" for rank, gpu in enumerate(self.trainer)]
        engines = [f"engine {index}: {', '.join(map(str, gpus))}" for index, gpus in enumerate(self.engines)]
        rewards = [f"reward model {name}: {', '.join(devices)}" for name, devices in self.rewards]
        return "; ".join([*trainer, *engines, *rewards])


def divide(
    num_gpus: int, trainer: Sequence[int], num_engines: int, *, each: int = 1, chosen: Sequence[int] = ()
) -> tuple[tuple[int, ...], ...]:
    """Return the GPUs of each engine. Each engine gets `each` GPUs. If there are too few GPUs, several engines use the
    same GPUs.

    `chosen`: GPUs that engines may use. By default, engines may use the GPUs on which no trainer rank runs. If fewer
    than `each` GPUs are without a trainer rank, engines may use all GPUs. Raises UserError if a chosen GPU does not
    exist, or if `each` is larger than the number of GPUs that engines may use.
    """
    if missing := [gpu for gpu in chosen if gpu >= num_gpus]:
        raise UserError(
            f"engine.devices: got {missing[0]}, but this machine has {num_gpus} visible GPU(s): allowed are 0 to "
            f"{num_gpus - 1}"
        )
    free = [gpu for gpu in range(num_gpus) if gpu not in trainer]
    pool = list(chosen) or (free if len(free) >= each else []) or list(range(num_gpus))
    places = [tuple(pool[first : first + each]) for first in range(0, len(pool) - each + 1, each)]
    if not places:
        raise UserError(
            f"engine.vllm.tensor_parallel × pipeline_parallel: got {each}, but {len(pool)} GPU(s) are available to "
            "engines; lower the value, or change engine.devices"
        )
    return tuple(places[engine % len(places)] for engine in range(num_engines))


def layout_of(recipe: Recipe) -> DeviceLayout | None:
    """Return the GPUs of a run whose trainer is on this machine; None if the run uses the CPU. Raises UserError."""
    import torch

    from baton.policy.load import torch_device

    device = torch_device(recipe.model.device)
    if device.type != "cuda":
        if recipe.engine.devices:
            raise UserError(
                f"engine.devices: got {list(recipe.engine.devices)}, but model.device is {device}; remove the key"
            )
        return None
    num_gpus, ranks = torch.cuda.device_count(), recipe.trainer.ranks
    own = device.index or 0
    if max(own, ranks - 1) >= num_gpus:
        key, got = ("model.device", str(device)) if own >= num_gpus else ("trainer.ranks", str(ranks))
        raise UserError(f"{key}: got {got}, but this machine has {num_gpus} visible GPU(s); lower the value")
    trainer = (own,) if ranks == 1 else tuple(range(ranks))
    engine, vllm = recipe.engine, recipe.engine.vllm
    each = vllm.tensor_parallel * vllm.pipeline_parallel if engine.kind == "vllm" else 1
    gpu_bytes = int(torch.cuda.get_device_properties(own).total_memory) if engine.kind == "vllm" else 0
    if recipe.rollout.is_colocated:
        if engine.devices:
            raise UserError(
                f'engine.devices: got {list(engine.devices)}, but with rollout.placement = "colocated" the engine uses '
                "the trainer's GPU; remove one of the keys"
            )
        if each != ranks:
            raise UserError(
                f"engine.vllm.tensor_parallel × pipeline_parallel: got {each}, but with rollout.placement = "
                f'"colocated" the engine uses all GPUs of the trainer; set the product to {ranks}'
            )
        return DeviceLayout(trainer, (trainer,), _reward_devices(recipe, num_gpus, trainer), gpu_bytes)
    replicas = {"vllm": vllm.replicas, "sglang": 0}.get(engine.kind, 1)
    count = recipe.swarm.workers if recipe.swarm.is_on else replicas
    engines = divide(num_gpus, trainer, count, each=each, chosen=engine.devices)
    if not recipe.swarm.is_on and len(set(engines)) < count:
        raise UserError(
            f"engine.vllm.replicas: got {count} with {each} GPU(s) each, but only {len(set(engines))} fit(s) on the "
            "GPUs of engines; lower the value, or change engine.devices"
        )
    used = (*trainer, *(gpu for gpus in engines for gpu in gpus))
    return DeviceLayout(trainer, engines, _reward_devices(recipe, num_gpus, used), gpu_bytes)


def _reward_devices(recipe: Recipe, num_gpus: int, used: Sequence[int]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return the devices of each reward model. `used`: the GPUs of the trainer, followed by the GPUs of the engines."""
    default = (f"cuda:{next((gpu for gpu in range(num_gpus) if gpu not in used), used[-1])}",)
    found = tuple((one.name, one.devices or default) for one in recipe.reward if one.kind == "model")
    for name, devices in found:
        if missing := [each for each in devices if (gpu_of(each) or 0) >= num_gpus]:
            raise UserError(
                f"[[reward]] {name!r}: devices: got {missing[0]}, but this machine has {num_gpus} visible GPU(s)"
            )
    return found


def gpu_of(device: str) -> int | None:
    """Return the index of a CUDA device such as `cuda:2`; None for a CPU."""
    kind, _, index = device.partition(":")
    return (int(index) if index.isdecimal() else 0) if kind == "cuda" else None


def placed_rewards(recipe: Recipe, layout: DeviceLayout | None) -> tuple[RewardSettings, ...]:
    """Return the recipe's reward parts, with the devices of reward models. Without a layout, the default device is the
    CPU."""
    devices = {} if layout is None else dict(layout.rewards)
    return tuple(
        one.model_copy(update={"devices": devices.get(one.name, one.devices or ("cpu",))})
        if one.kind == "model"
        else one
        for one in recipe.reward
    )


def direct_transfer(layout: DeviceLayout | None, *, is_sparse: bool = False) -> DirectTransfer:
    """Return how versions are transferred from the trainer to the run's engine. If trainer and engine use the same GPU,
    the backend is `ipc`, because NCCL refuses two processes on one GPU. Raises UserError if `ipc` does not support the
    run: several replicas, several trainer ranks, or `is_sparse`."""
    if layout is None:
        return DirectTransfer("gloo", is_sparse)
    shared = [gpus for gpus in layout.engines if set(layout.trainer) & set(gpus)]
    if not shared:
        return DirectTransfer("nccl", is_sparse, layout.trainer[0])
    if len(layout.engines) > 1:
        raise UserError(
            f"engine.vllm.replicas: got {len(layout.engines)}, but a replica and the trainer use the same GPU; lower "
            "the value, or choose other GPUs with engine.devices"
        )
    if is_sparse:
        raise UserError(
            'weights.transport: got "sparse", but trainer and engine use the same GPU, so there is no transfer to '
            'shorten; use "direct", or choose other GPUs with engine.devices'
        )
    if len(layout.trainer) > 1:
        raise UserError(
            'weights.transport: got "direct", but trainer ranks and the engine use the same GPUs: NCCL cannot send '
            'within a GPU, and CUDA IPC supports one rank only; use "store", or choose other GPUs with engine.devices'
        )
    return DirectTransfer("ipc", gpu=layout.trainer[0])


def visible(gpus: Sequence[int]) -> dict[str, str]:
    """Return the environment variable that restricts a new process to these GPUs. `gpus`: indices among the GPUs that
    this process sees."""
    import torch

    names = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES") if torch.version.hip else ("CUDA_VISIBLE_DEVICES",)
    name = next((each for each in names if each in os.environ), names[0])
    known = [each.strip() for each in os.environ.get(name, "").split(",") if each.strip()]
    return {name: ",".join(known[gpu] if known else str(gpu) for gpu in gpus)}


@contextmanager
def environment_with(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for the processes that are started in this context."""
    before = {name: os.environ[name] for name in variables if name in os.environ}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)
        os.environ.update(before)

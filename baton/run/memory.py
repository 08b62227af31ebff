"""The memory of each process of a run, according to `cost/memory.py`, and the changes that make a run fit into
memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from baton.clock import CODERS
from baton.cost.memory import (
    GPU_CONTEXT_BYTES,
    KEPT_CONTEXTS,
    PUBLISHED_COPY,
    SLEEPING_VLLM_BYTES,
    SLOT_MULTIPLE,
    EngineShape,
    Phase,
    Term,
    adapter_params,
    engine_terms,
    largest,
    overhead,
    scorer_terms,
    server_terms,
)
from baton.files import memory_directory
from baton.policy.settings import DTypeChoice, LoraSettings, dtype_on
from baton.policy.tokenizer import model_directory
from baton.recipe.recipe import Recipe
from baton.rewards.settings import RewardSettings
from baton.run.devices import DeviceLayout, gpu_of, placed_rewards
from baton.specs.model import ModelSpec, read_model
from baton.trainer.memory import microbatch_tokens, trainer_phases
from baton.trainer.parallel.schedule import stage_layers

GENERATION = "generation"
_SLEEPING = ("weights", "moments", "frozen weights")
"""Parts of a trainer's memory that stay allocated while an engine uses the device."""

_CODED_PART_BYTES = 80 * 2**20
"""Maximum memory in bytes of a thread that encodes a part of a version (measured: 76 MiB if 90 % of elements
change)."""


class MemoryPart(msgspec.Struct, frozen=True):
    """An item of a process's memory, such as its weights."""

    name: str
    num_bytes: int
    is_assumed: bool
    """Whether the number is an assumption. Otherwise it is computed from the shapes of tensors."""


class ProcessMemory(msgspec.Struct, frozen=True):
    """The peak memory of a process of a run, or of each of several equal processes."""

    name: str
    count: int
    """Number of equal processes. On a CPU, all processes share the host's memory. With GPUs and empty `gpus`, each
    process is assumed to have its own GPU."""
    phase: str
    """The phase in which the process needs the most memory."""
    parts: tuple[MemoryPart, ...]
    gpus: tuple[tuple[int, ...], ...] = ()
    """The GPUs of each of the equal processes; empty on a CPU, and on other machines."""
    on_host: bool = False
    """Whether this is host memory, even if the run uses GPUs."""
    alternates: bool = False
    """Whether this process and another process use the same GPUs alternately. It is True for both processes. `parts`
    then includes the memory that the other process keeps on the GPUs while it sleeps."""

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)


def value_bytes(dtype: DTypeChoice, *, on_cpu: bool) -> int:
    """Return the bytes per value of a dtype in a recipe."""
    return 4 if dtype_on("cpu" if on_cpu else "cuda", dtype) == "float32" else 2


def most_tokens_of(recipe: Recipe) -> int:
    """Return the number of tokens of the largest possible microbatch on one rank."""
    return math.ceil(microbatch_tokens(recipe.trainer, recipe.engine.max_context_tokens, _batch_tokens(recipe)))


def _batch_tokens(recipe: Recipe) -> float:
    trajectories = recipe.rollout.batch_groups * recipe.rollout.group_size
    return trajectories * recipe.engine.max_context_tokens / recipe.algorithm.num_minibatches


def rank_phases_of(
    recipe: Recipe, model: ModelSpec, *, on_cpu: bool, stage: int = 0, most_tokens: float = math.inf
) -> tuple[Phase, ...]:
    """Return the phases of a trainer rank, with the memory of each phase. `stage`: index of the rank's pipeline stage.
    `most_tokens`: number of tokens of the largest microbatch, if this is smaller than `most_tokens_of`."""
    trajectories = recipe.rollout.batch_groups * recipe.rollout.group_size
    return trainer_phases(
        model,
        recipe.trainer,
        recipe.algorithm,
        recipe.lora,
        value_bytes=value_bytes(recipe.trainer.dtype, on_cpu=on_cpu),
        # for engines in other processes, the trainer writes a version to a file, one tensor at a time
        published_bytes=0.0
        if recipe.swarm.is_on or recipe.engine.processes
        else _published_bytes(recipe, on_cpu=on_cpu),
        longest_tokens=recipe.engine.max_context_tokens,
        batch_tokens=_batch_tokens(recipe),
        on_cpu=on_cpu,
        stage=stage,
        float32_head=recipe.model.head_dtype == "float32",
        max_kept=recipe.rollout.max_kept,
        sampled_tokens=trajectories * recipe.rollout.max_new_tokens,
        most_tokens=most_tokens,
        # the last replicas may receive a version while the trainer computes the next one
        keeps_version=recipe.weights.transport == "sparse" or recipe.engine.vllm.replicas > 1,
    )


def _published_bytes(recipe: Recipe, *, on_cpu: bool) -> int:
    published = recipe.engine.dtype if recipe.weights.dtype == "auto" else recipe.weights.dtype
    return value_bytes(published, on_cpu=on_cpu)


def stages_of(
    recipe: Recipe, model: ModelSpec, *, on_cpu: bool, most_tokens: float = math.inf
) -> list[tuple[tuple[Phase, ...], int]]:
    """For each pipeline stage, return the phases and the number of layers of a rank. Raises UserError if
    `trainer.stages` does not fit the model's number of layers."""
    layers = stage_layers(recipe.trainer.stages, model.num_layers)
    return [
        (rank_phases_of(recipe, model, on_cpu=on_cpu, stage=stage, most_tokens=most_tokens), count)
        for stage, count in enumerate(layers)
    ]


def engine_terms_of(recipe: Recipe, model: ModelSpec, *, on_cpu: bool) -> tuple[Term, ...]:
    """Return the memory terms of each embedded engine of the recipe."""
    wide, slots = value_bytes(recipe.engine.dtype, on_cpu=on_cpu), recipe.engine.slots
    resumes = recipe.rollout.mode != "sync" or recipe.multi_turn_task is not None
    return engine_terms(
        model,
        EngineShape(
            slots=max(16, slots),
            context_tokens=recipe.engine.max_context_tokens,
            value_bytes=wide,
            kept_contexts=(max(KEPT_CONTEXTS, slots) if on_cpu else KEPT_CONTEXTS) if resumes else 1,
            packs=on_cpu and wide == 2,
            float32_head=recipe.model.head_dtype == "float32",
            adapter_params=0.0 if recipe.lora is None else adapter_params(model, recipe.lora.rank),
        ),
    )


def processes_of(
    recipe: Recipe,
    model: ModelSpec,
    *,
    on_cpu: bool,
    layout: DeviceLayout | None = None,
    most_tokens: float = math.inf,
) -> tuple[ProcessMemory, ...]:
    """Return the processes of a run with their memory. Two files in host memory are listed as processes too: the
    published version and the unwritten checkpoint.

    `layout`: this machine's GPUs; None if the run uses a CPU or other machines. On other machines, every process is
    assumed to have its own GPU. There is one exception: an embedded engine in the trainer's process shares the
    trainer's GPU. An engine of kind `vllm` takes a fixed share of its GPUs' memory. This engine is counted only if its
    GPUs are in this machine. `most_tokens`: number of tokens of the largest microbatch, if this is smaller than
    `most_tokens_of`.
    """
    ranks, layers = recipe.trainer.ranks, model.num_layers
    has_engine = recipe.engine.kind == "embedded"
    engine = engine_terms_of(recipe, model, on_cpu=on_cpu) if has_engine else ()
    apart = recipe.swarm.workers if recipe.swarm.is_on else recipe.engine.processes
    is_inside = has_engine and not recipe.swarm.is_on and not recipe.engine.processes
    trainer_gpus = () if layout is None else tuple((gpu,) for gpu in layout.trainer)
    engine_gpus = () if layout is None else layout.engines
    alternates = recipe.rollout.is_colocated and not on_cpu and (recipe.fleet.ray or not has_engine)
    generation, found = [Phase(GENERATION, engine)], []
    if ranks > 1 or not is_inside or engine_gpus != trainer_gpus:
        stages = stages_of(recipe, model, on_cpu=on_cpu, most_tokens=most_tokens)
        size = ranks // len(stages)
        name = "the trainer" if ranks == 1 else f"each of {size} trainer ranks" if size > 1 else "the trainer rank"
        for stage, (own, count) in enumerate(stages):
            where = f" of stage {stage + 1} of {len(stages)}" if len(stages) > 1 else ""
            places = trainer_gpus[stage * size : (stage + 1) * size] or size
            if alternates:
                num_bytes = GPU_CONTEXT_BYTES if has_engine else SLEEPING_VLLM_BYTES
                asleep = Term("sleeping engine" if has_engine else "sleeping vLLM", num_bytes, is_assumed=True)
                own = tuple(Phase(phase.name, (*phase.terms, asleep)) for phase in own)
            found.append(_process(name + where, places, own, count, on_cpu=on_cpu, alternates=alternates))
        if is_inside:
            found.append(_process("the engine", engine_gpus or 1, generation, layers, on_cpu=on_cpu))
    else:
        phases = rank_phases_of(recipe, model, on_cpu=on_cpu, most_tokens=most_tokens)
        rests = tuple(term for term in phases[0].terms if term.name in _SLEEPING)
        if recipe.rollout.is_colocated:
            # on a CPU, the engine loads the published copy beside the state of the sleeping trainer
            copy = tuple(term for phase in phases for term in phase.terms if term.name == PUBLISHED_COPY)
            turns = [*phases, Phase(GENERATION, (*((*rests, *copy) if on_cpu else ()), *engine))]
        else:
            turns = [Phase(phase.name, (*phase.terms, *engine)) for phase in phases]
        name = "the trainer or the engine" if recipe.rollout.is_colocated else "the trainer with the engine"
        found.append(_process(name, trainer_gpus or 1, turns, layers, on_cpu=on_cpu))
    if has_engine and apart:
        name = "the engine" if apart == 1 else f"each of {apart} engines"
        found.append(_process(name, engine_gpus or apart, generation, layers, on_cpu=on_cpu))
    if layout is not None and layout.gpu_bytes and engine_gpus:
        found.append(_vllm_process(recipe, model, layout, alternates=alternates))
    if recipe.lora is None and recipe.engine.processes:  # other processes map the file of the version
        part = MemoryPart("weights", math.ceil(_published_bytes(recipe, on_cpu=on_cpu) * model.params), False)
        where = "the published version" if on_cpu else "the published version in host memory"
        found.append(ProcessMemory(where, 1, "publication", (part,), on_host=True))
    if recipe.checkpoint.background:
        shares = (recipe.trainer.shard_size or recipe.trainer.data_ranks) * recipe.trainer.tensor_parallel
        kept = [
            shares * float(term.bytes(count))
            for own, count in stages_of(recipe, model, on_cpu=on_cpu)
            for term in own[0].terms
            if term.name in ("weights", "moments")
        ]
        part = MemoryPart("weights and moments", math.ceil(sum(kept)), False)
        name = "the unwritten checkpoint" if on_cpu else "the unwritten checkpoint in host memory"
        found.append(ProcessMemory(name, 1, "checkpoint", (part,), on_host=True))
    if recipe.swarm.is_on:
        found.append(_hub(recipe, model, on_cpu=on_cpu))
    longest, rewards = recipe.engine.max_context_tokens, placed_rewards(recipe, layout)
    found += [_reward_process(one, longest, on_cpu=on_cpu) for one in rewards if one.kind == "model"]
    return tuple(found)


def _hub(recipe: Recipe, model: ModelSpec, *, on_cpu: bool) -> ProcessMemory:
    """Return the host memory of a swarm's hub. The hub reads versions, and the base weights of adapters, in pieces from
    mapped files."""
    base = 4.0 * model.params  # read in float32
    values = model.params if recipe.lora is None else adapter_params(model, recipe.lora.rank)
    version = _published_bytes(recipe, on_cpu=on_cpu) * float(values)
    largest_version = version if recipe.lora is None else base
    sizes = {"parts that are coded": min((CODERS + 1) * _CODED_PART_BYTES, 10 * largest_version)}
    if recipe.lora is not None:
        sizes["largest tensor of the base weights"] = 4.0 * model.embedding_params
    memory = memory_directory()
    if memory is not None and recipe.weights.files is not None and Path(recipe.weights.files).is_relative_to(memory):
        sizes["files of versions"] = (3 + recipe.num_fetchable_versions) * version + (largest_version - version)
    if recipe.checks_reports(others_join=recipe.swarm.serve is not None) and recipe.inspection.device == "cpu":
        kept = 0.0 if recipe.lora is None else float(model.num_layers * model.layer_params)
        sizes["verification: weights"] = value_bytes(recipe.engine.dtype, on_cpu=True) * (model.params + kept)
    parts = tuple(MemoryPart(name, math.ceil(num_bytes), False) for name, num_bytes in sizes.items())
    return ProcessMemory("the hub", 1, "publication", parts, on_host=True)


def _reward_process(reward: RewardSettings, longest_tokens: int, *, on_cpu: bool) -> ProcessMemory:
    """Return the memory of a reward model on each device. On a CPU, the model scores one trajectory at a time."""
    gpus = tuple((gpu,) for device in reward.devices if (gpu := gpu_of(device)) is not None)
    wide, places = value_bytes(reward.dtype, on_cpu=not gpus), gpus or len(reward.devices)
    tokens = max(longest_tokens, reward.batch_tokens) if gpus else longest_tokens
    model = read_model(model_directory(reward.model or ""))
    if reward.starts_server:
        terms = server_terms(model, wide, reward.concurrency, reward.context_tokens)
    else:
        terms = scorer_terms(model, wide, tokens)
    phases = [Phase("scoring", terms)]
    name = "the reward model" if len(reward.devices) == 1 else f"each of {len(reward.devices)} reward models"
    found = _process(f"{name} {reward.name!r}", places, phases, 0, on_cpu=not gpus)
    return msgspec.structs.replace(found, on_host=not gpus and not on_cpu)


def _vllm_process(recipe: Recipe, model: ModelSpec, layout: DeviceLayout, *, alternates: bool) -> ProcessMemory:
    """Return the memory of each vLLM engine on each of its GPUs: the share `engine.vllm.gpu_memory_utilization` of the
    GPU."""
    own, gpus = recipe.engine.vllm, layout.engines
    share = math.ceil(own.gpu_memory_utilization * layout.gpu_bytes)
    value = 1 if own.quantization else value_bytes(recipe.engine.dtype, on_cpu=False)
    weights = math.ceil(value * model.params / (own.tensor_parallel * own.pipeline_parallel))
    parts = [MemoryPart("weights", weights, False), MemoryPart("KV cache and others", max(0, share - weights), False)]
    if alternates:
        parts.append(MemoryPart("sleeping trainer", math.ceil(GPU_CONTEXT_BYTES), True))
    name = "vLLM" if len(gpus) == 1 else f"each of {len(gpus)} vLLM engines"
    return ProcessMemory(name, len(gpus), GENERATION, tuple(parts), gpus, alternates=alternates)


def _process(
    name: str,
    places: int | tuple[tuple[int, ...], ...],
    phases: Sequence[Phase],
    layers: int,
    *,
    on_cpu: bool,
    alternates: bool = False,
) -> ProcessMemory:
    """`places`: the GPUs of each process, or the number of processes."""
    top = largest(phases, layers)
    terms = (*top.terms, overhead(float(top.bytes(layers)), on_cpu=on_cpu))
    parts = [MemoryPart(term.name, math.ceil(float(term.bytes(layers))), term.is_assumed) for term in terms]
    count, gpus = (places, ()) if isinstance(places, int) else (len(places), places)
    parts = [part for part in parts if part.num_bytes]
    return ProcessMemory(name, count, top.name, tuple(parts), gpus, alternates=alternates)


def gib(num_bytes: float) -> str:
    """Return a size in bytes as text for the user, such as `1.5 GiB`."""
    return f"{num_bytes / 2**30:.3g} GiB"


def sleeping_bytes(phases: Sequence[Phase], layers: int) -> float:
    """Return the bytes of a trainer that has freed its gradients and its working memory."""
    return float(sum(term.bytes(layers) for term in phases[0].terms if term.name in _SLEEPING))


def needed_bytes(processes: Sequence[ProcessMemory], *, on_cpu: bool) -> int:
    """Return the bytes that all processes need on a CPU, or the bytes that are needed on the fullest GPU. If the GPUs
    are unknown, the fullest GPU is assumed to hold one process of each kind."""
    processes = [process for process in processes if on_cpu or not process.on_host]
    if any(process.gpus for process in processes):
        gpus = {gpu for process in processes for each in process.gpus for gpu in each}
        return max(_on_gpu([p for p in processes for each in p.gpus if gpu in each]) for gpu in gpus)
    return sum(process.num_bytes * (process.count if on_cpu else 1) for process in processes)


def _on_gpu(processes: Sequence[ProcessMemory]) -> int:
    turns = max((process.num_bytes for process in processes if process.alternates), default=0)
    return turns + sum(process.num_bytes for process in processes if not process.alternates)


def explain(processes: Sequence[ProcessMemory], free: int, device: str, change: str) -> str:
    """Return a sentence that names the processes, the three largest parts of each, the free memory, and `change`."""
    lines = []
    for process in sorted(processes, key=lambda process: -process.num_bytes):
        parts = sorted(process.parts, key=lambda part: -part.num_bytes)[:3]
        most = ", ".join(f"{part.name} {gib(part.num_bytes)}" for part in parts)
        lines.append(f"{process.name} needs {gib(process.num_bytes)} ({process.phase}: {most})")
    return f"{', '.join(lines)}, but {gib(free)} are free on {device}: {change}"


def change_that_fits(recipe: Recipe, fits: Callable[[Recipe], bool]) -> str:
    """Return a text with the changes that make the recipe fit into memory, least costly first. If no key makes the
    recipe fit, return other advice."""
    steps = [step for step in _steps(recipe) if step[2] is not None]
    taken: list[tuple[str, str, Any]] = []
    while steps and not fits(_with(recipe, taken)):
        taken.append(steps.pop(0))
    if not fits(_with(recipe, taken)):
        return (
            "no usual change of the recipe is enough: lower engine.slots or engine.max_context_tokens much further, or "
            "use a smaller model, trainer.ranks or workers ([swarm]) on more devices, or more memory"
        )
    for step in list(taken):  # omit changes that later changes made unnecessary
        if fits(_with(recipe, [other for other in taken if other is not step])):
            taken.remove(step)
    return "with " + " and ".join(_named(*step) for step in taken) + " it fits"


def _steps(recipe: Recipe) -> list[tuple[str, str, Any]]:
    """Return changes of the recipe that save memory, least costly first, as (section, key, value). The value None means
    that the change is not possible."""
    trainer, engine, rollout = recipe.trainer, recipe.engine, recipe.rollout
    tokens = engine.max_context_tokens
    halves = [slots for divisor in (2, 4, 8) if (slots := engine.slots // divisor // SLOT_MULTIPLE * SLOT_MULTIPLE)]
    is_alone = trainer.ranks == 1 and engine.kind == "embedded" and not engine.processes and not recipe.swarm.is_on
    can_share = is_alone and rollout.mode != "async" and not rollout.is_colocated
    lower = [share for share in (0.8, 0.6, 0.4) if share < engine.vllm.gpu_memory_utilization]
    shares = [engine.vllm.model_copy(update={"gpu_memory_utilization": share}) for share in lower]
    return [
        ("trainer", "max_tokens_per_microbatch", tokens if tokens < trainer.max_tokens_per_microbatch else None),
        ("trainer", "activation_checkpointing", None if trainer.activation_checkpointing else True),
        ("trainer", "shard_gradients", True if trainer.ranks > 1 and not trainer.shard_gradients else None),
        *[("engine", "slots", slots) for slots in halves],
        ("rollout", "placement", "colocated" if can_share else None),
        *[("engine", "vllm", share) for share in shares if engine.kind == "vllm"],
        ("engine", "dtype", None if engine.dtype == "bfloat16" else "bfloat16"),
        ("trainer", "optimizer", "adamw8bit" if trainer.ranks == 1 and recipe.lora is None else None),
        ("", "lora", LoraSettings() if recipe.lora is None else None),
    ]


def _with(recipe: Recipe, steps: Sequence[tuple[str, str, Any]]) -> Recipe:
    for section, key, value in steps:
        changed = {key: value} if not section else {section: getattr(recipe, section).model_copy(update={key: value})}
        recipe = recipe.model_copy(update=changed)
    return recipe


def _named(section: str, key: str, value: Any) -> str:
    if key == "vllm":
        section, key, value = "engine.vllm", "gpu_memory_utilization", value.gpu_memory_utilization
    shown = "true" if value is True else f'"{value}"' if isinstance(value, str) else value
    return f"[{key}]" if not section else f"{section}.{key} = {shown}"

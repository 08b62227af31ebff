"""`baton profile`: measures this device with the embedded engine and the trainer, and writes a calibration file.

Every figure is the median of several: what a run on this machine will meet, its usual disturbances included. Decode and
prefill over batch and context, train steps over context, a whole batch, publication of weights; then the shares of peak
with which the cost model comes nearest to all of them. On a CPU an engine process has one thread, the trainer has all:
there one core counts as one GPU.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import tomli_w
import torch
from safetensors.torch import load_file, save_file

from baton.build import build_engine, build_port, build_trainer, set_up_torch
from baton.cluster import find_gpu, gpu_types
from baton.config import Recipe
from baton.cost.efficiency import Efficiency
from baton.cost.fit import Measured, fit, with_rollout
from baton.cost.generate import Place
from baton.errors import EngineFault, UserError
from baton.files import write_whole
from baton.model import read_model
from baton.planning import recipe_workload
from baton.policy.load import load_model, torch_device, torch_dtype
from baton.policy.tokenizer import load_tokenizer
from baton.rollout.engines.embedded import EmbeddedEngine
from baton.rollout.sweep import Request, Sweep
from baton.tasks.stream import PromptStream, TaskMixture
from baton.trainer import alarms
from baton.trainer.local import LocalTrainer
from baton.types import (
    Batch,
    FinishReason,
    Group,
    Judged,
    Judgement,
    Lease,
    Message,
    PolicyVersion,
    Prompt,
    SamplingParams,
    Segment,
    Trajectory,
)
from baton.workload import Workload, measured

DECODE_STEPS = 24
REPEATS = 5
CONTEXT_SHARES = (0.125, 0.35, 0.7)
"""Of the engine's context: where decode and prefill are measured."""
LONGEST_ROLLOUT = 256
"""Tokens at which the responses of a whole batch are cut, so that measuring takes no longer."""
LENGTH_SHARES = (0.1, 0.25, 0.6)
"""Of the longest response: where training is measured."""
Say = Callable[[str], None]


class Profile(msgspec.Struct, frozen=True):
    """What was measured, and what fits it."""

    gpu: str
    devices: int
    """Cores (or GPUs) that the trainer has."""
    efficiency: Efficiency
    points: list[Measured]
    publish_s: float


def profile(recipe: Recipe, gpu: str | None, say: Say, companion: Sequence[str] = ()) -> Profile:
    """Measure the recipe's model, engine and trainer on its device. Raises UserError for a GPU without a name.

    `companion` is a command that keeps an engine busy: where a run has several engine processes, they are measured
    while the others work, because they share memory and cores.
    """
    device = torch_device(recipe.model.device)
    on_cpu = device.type == "cpu"
    name = gpu or _gpu_name(device)
    find_gpu(name, gpu_types(), "--gpu")
    threads = set_up_torch(recipe.run.threads)
    devices = threads if on_cpu else 1
    torch.set_num_threads(1 if on_cpu and recipe.engine.processes else threads)
    with _companions(companion, recipe.engine.processes - 1 if on_cpu else 0):
        points = list(_engine_points(recipe, say))
    torch.set_num_threads(threads)
    trainer = _trainer(recipe)
    alarms.logger.disabled = True  # made-up trajectories are as far from the policy as can be
    try:
        points += list(_train_points(recipe, trainer, say))
    finally:
        alarms.logger.disabled = False
    publish_s = _publish_s(recipe, trainer)
    say(f"publication: {publish_s * 1e3:.1f} ms")
    rollout, lengths = _rollout_point(recipe, say)
    spec = read_model(Path(recipe.model.path))
    hardware = gpu_types()[name]
    start = Efficiency(
        train=0.5, prefill=0.5, decode=0.5, decode_compute=0.5, step_overhead_s=1e-3, row_overhead_s=1e-5
    )
    place = Place(hardware, hardware.link_bytes_per_s, hardware.link_bytes_per_s, 0.0, start)
    found, shown = fit(spec, recipe_workload(recipe), place, devices, points)
    fitted = msgspec.structs.replace(place, efficiency=found)
    found, whole = with_rollout(spec, lengths, fitted, max(1, recipe.engine.processes), rollout)
    found = msgspec.structs.replace(found, publish=1.0, publish_latency_s=publish_s)
    return Profile(name, devices, found, [*shown, whole], publish_s)


def write_calibration(found: Profile, path: Path) -> None:
    """Write the calibration file that `baton plan --calibration` reads."""
    tree: dict[str, Any] = {
        "notes": {
            "written_by": "baton profile",
            "device": f"{found.devices} × {found.gpu}",
            "cores": os.cpu_count() or 0,
            "torch": torch.__version__,
        },
        "efficiency": {found.gpu: msgspec.to_builtins(found.efficiency)},
        "measured": [msgspec.to_builtins(point) for point in found.points],
    }
    write_whole(path, tomli_w.dumps(tree).encode("utf-8"))


def _gpu_name(device: torch.device) -> str:
    if device.type == "cpu":
        return "CPU"
    shown = torch.cuda.get_device_name(device)
    plain = shown.replace(" ", "").replace("GeForce", "")
    for name in sorted(gpu_types(), key=len, reverse=True):
        if name.replace("-", "") in plain.replace("-", ""):
            return name
    raise UserError(f"--gpu: {shown} is no GPU of the catalogue; name the one it is like: {', '.join(gpu_types())}")


# ---- the engine ------------------------------------------------------------------------------------------------------


@contextmanager
def _companions(command: Sequence[str], count: int) -> Iterator[None]:
    """Keep as many engines busy, each in a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=environment)
        for _ in range(max(0, count) if command else 0)
    ]
    try:
        for child in started:
            assert child.stdout is not None, "it was asked for"
            if not child.stdout.readline():
                raise EngineFault("an engine beside the measured one did not start")
        yield
    finally:
        for child in started:
            child.kill()
            child.wait()


def keep_busy(recipe: Recipe) -> None:
    """Generate until killed, as an engine process would; says so on stdout first."""
    set_up_torch(1)
    engine = _engine(recipe)
    context, first = int(recipe.engine.max_context_tokens * CONTEXT_SHARES[0]), 0
    while True:
        _timed(engine, recipe.engine.slots, context, first, DECODE_STEPS)
        first += recipe.engine.slots
        if first == recipe.engine.slots:
            sys.stdout.write("busy\n")
            sys.stdout.flush()


def _engine(recipe: Recipe) -> EmbeddedEngine:
    """The recipe's engine, but nothing ends a trajectory except its length."""
    model = load_model(
        recipe.model.path,
        dtype=torch_dtype(recipe.engine.dtype),
        device=torch_device(recipe.model.device),
        attention=recipe.model.attention,
    )
    tokenizer = load_tokenizer(recipe.model.path)
    return EmbeddedEngine(model, tokenizer, recipe.engine, PolicyVersion("profile", 0), ())


def _engine_points(recipe: Recipe, say: Say) -> Iterator[Measured]:
    engine = _engine(recipe)
    slots, longest = recipe.engine.slots, recipe.engine.max_context_tokens
    batches = sorted({max(1, slots // 4), max(1, slots // 2), slots})
    leases = 0
    for share in CONTEXT_SHARES:
        context = max(2, int(longest * share))
        for batch in batches:
            runs = []
            for _ in range(REPEATS):
                runs.append(_timed(engine, batch, context, leases, min(DECODE_STEPS, longest - context - 1)))
                leases += batch
            decode, prefill = statistics.median(run[1] for run in runs), statistics.median(run[0] for run in runs)
            middle = context + DECODE_STEPS // 2
            yield Measured("decode", batch, middle, decode)
            yield Measured("prefill", batch, context, max(prefill, 1e-6))
            say(
                f"batch {batch}, context {context}: decode {batch / decode:,.0f} tokens/s, "
                f"prefill {batch * context / max(prefill, 1e-6):,.0f} tokens/s"
            )


def _timed(engine: EmbeddedEngine, batch: int, context: int, first: int, steps: int) -> tuple[float, float]:
    """Return the seconds of prefill and of a decode step, for distinct prompts."""
    generator = torch.Generator().manual_seed(first)
    sampling = SamplingParams(steps + 2)
    for index in range(batch):
        ids = torch.randint(3, 60, (context,), generator=generator).tolist()
        trajectory = Trajectory(first + index, 0, tuple(ids))
        engine.submit(Lease(first + index, trajectory, sampling, 0, engine.version.number))
    times = []
    for _ in range(steps):
        started = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - started)
    for index in range(batch):
        engine.abort(first + index)
    engine.step()
    decode = statistics.median(times[len(times) // 4 :])
    return times[0] - decode, decode


# ---- a whole batch ---------------------------------------------------------------------------------------------------


def _rollout_point(recipe: Recipe, say: Say) -> tuple[Measured, Workload]:
    """Generate a batch of the recipe's own prompts to its end, as a run does; return its time and its lengths."""
    rollout = recipe.rollout
    tokenizer = load_tokenizer(recipe.model.path)
    prompts = PromptStream(TaskMixture(recipe.task, recipe.answer), recipe.run.seed).take(rollout.batch_groups)
    requests = [Request(i, tokenizer.prompt_ids(p.messages), rollout.group_size) for i, p in enumerate(prompts)]
    port = build_port(recipe, recipe.model.path, PolicyVersion("profile", 0))
    sweep = Sweep(port, rollout.stall_timeout_s, max_context_tokens=recipe.engine.max_context_tokens)
    sampling = rollout.sampling()
    sampling = msgspec.structs.replace(sampling, max_new_tokens=min(sampling.max_new_tokens, LONGEST_ROLLOUT))
    times, trajectories = [], []
    try:
        for _ in range(REPEATS + 1):  # the first one warms up
            started = time.perf_counter()
            trajectories = list(sweep.rollout(requests, sampling, noise_seed=recipe.run.seed, version=0))
            times.append(time.perf_counter() - started)
    finally:
        port.close()
    lengths = msgspec.structs.replace(
        recipe_workload(recipe),
        prompt=measured([len(t.prompt_ids) for t in trajectories]),
        output=measured([max(1, t.num_tokens) for t in trajectories]),
        max_staleness=0,
    )
    point = Measured("rollout", len(trajectories), round(lengths.output.mean), statistics.median(times[1:]))
    say(f"a batch of {point.batch} responses, {point.context} tokens on average: {point.seconds:.3f} s")
    return point, lengths


# ---- the trainer -----------------------------------------------------------------------------------------------------


def _trainer(recipe: Recipe) -> LocalTrainer:
    """The recipe's own trainer, at a learning rate that leaves the weights as they are."""
    still = recipe.trainer.model_copy(update={"lr": 1e-12, "warmup_steps": 0, "decay": "constant"})
    return build_trainer(recipe.model_copy(update={"trainer": still}), load_tokenizer(recipe.model.path))


def _train_points(recipe: Recipe, trainer: LocalTrainer, say: Say) -> Iterator[Measured]:
    rollout = recipe.rollout
    count = rollout.batch_groups * rollout.group_size
    for share in LENGTH_SHARES:
        length = max(4, int(rollout.max_new_tokens * share))
        times = []
        for _ in range(REPEATS):
            batch = _batch(trainer.version.number + 1, rollout.batch_groups, rollout.group_size, length)
            started = time.perf_counter()
            trainer.step(batch)
            times.append(time.perf_counter() - started)
        seconds = statistics.median(times)
        yield Measured("train", count, length, seconds)
        say(f"train, {count} trajectories of {length} tokens: {count * length / seconds:,.0f} tokens/s")


def _batch(step: int, groups: int, group_size: int, length: int) -> Batch:
    """Trajectories of `length` tokens on average, half of them prompt, responses from next to nothing to twice the
    mean; rewards differ in every group, so that all have gradient."""
    generator = torch.Generator().manual_seed(step)
    prompt = max(1, length // 2)

    def member(group: int, index: int) -> Judged:
        own = prompt + max(1, round(2 * (length - prompt) * float(torch.rand((), generator=generator))))
        ids = torch.randint(3, 60, (own,), generator=generator).tolist()
        segment = Segment(tuple(ids[prompt:]), (-1.0,) * (own - prompt), step - 1)
        trajectory = Trajectory(group, index, tuple(ids[:prompt]), (segment,), FinishReason.LENGTH)
        return Judged(trajectory, Judgement(float(index % 2), {}, bool(index % 2)))

    return Batch(
        step,
        tuple(
            Group(
                step * groups + g,
                Prompt(str(g), "profile", (Message("user", ""),)),
                tuple(member(step * groups + g, index) for index in range(group_size)),
            )
            for g in range(groups)
        ),
    )


def _publish_s(recipe: Recipe, trainer: LocalTrainer) -> float:
    """Publish, write to a file, read it and load it into an engine: the way weights go to an engine process."""
    engine = build_engine(recipe, recipe.model.path, PolicyVersion("profile", 0))
    times = []
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "weights.safetensors"
        for _ in range(REPEATS):
            started = time.perf_counter()
            weights = trainer.publish()
            save_file({name: tensor.detach().cpu().contiguous() for name, tensor in weights.tensors.items()}, path)
            engine.load_weights(load_file(path), weights.version)
            times.append(time.perf_counter() - started)
    return statistics.median(times)

"""`baton profile`: measures this device with the embedded engine and the trainer, and writes a calibration file.

`engine.py` measures decode and prefill for several batch sizes and context lengths. `train_steps.py` measures batches
of the recipe's prompts and train steps, alternately. Every figure is a median over repeats. The cost model's parameters
are then fitted to these measurements. On a CPU, an engine process has one thread, the trainer has as many threads as in
a run, and a core counts as a GPU. Finally, `whole_steps.py` runs the recipe for some train steps, in which all
processes share cores and memory, and fits the parameters to the measured times.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import tomli_w
import torch

from baton.cost.efficiency import Efficiency
from baton.cost.fit import Measurement, fit, with_rollout
from baton.cost.generate import DeviceClass
from baton.errors import UserError
from baton.files import write_whole
from baton.policy.adapters import base_of_adapter
from baton.policy.load import torch_device
from baton.policy.tokenizer import check_model_path, model_directory
from baton.profile.engine import Say, companions, engine_points
from baton.profile.train_steps import measure_train_steps
from baton.profile.whole_steps import with_whole_steps
from baton.recipe.recipe import Recipe
from baton.recipe.workload import recipe_workload
from baton.run.assemble import engines_beside, set_up_torch
from baton.run.resume import with_dtypes
from baton.specs.cluster import GB, find_gpu, gpu_types
from baton.specs.model import read_model
from baton.trainer import alarms


class Profile(msgspec.Struct, frozen=True):
    """The measurements of a device, and the efficiencies that were fitted to these measurements."""

    gpu: str
    devices: int
    """Number of cores or GPUs that the trainer uses."""
    efficiency: Efficiency
    points: list[Measurement]
    publish_s: float


def profile(recipe: Recipe, gpu: str | None, say: Say, companion: Sequence[str] = (), *, num_steps: int) -> Profile:
    """Measure the recipe's model, engine and trainer on the recipe's device, then a run of `num_steps` train steps.
    Raises UserError if the GPU's name is unknown or the run fails.

    `companion` is a command that runs a busy engine. If the recipe has several engine processes on a CPU, one process
    is measured while the others are busy, because all processes share memory and cores.
    """
    recipe = with_dtypes(recipe)  # as in a run: the cost model needs the bytes per element
    device = torch_device(recipe.model.device)
    on_cpu = device.type == "cpu"
    name = gpu or _gpu_name(device)
    find_gpu(name, gpu_types(), "--gpu")
    check_model_path(base_of_adapter(Path(recipe.model.path)) or recipe.model.path)
    spec = read_model(model_directory(recipe.model.path))
    threads = set_up_torch(recipe.run.threads, busy=engines_beside(recipe))
    devices = threads if on_cpu else 1
    processes = recipe.swarm.workers or recipe.engine.processes
    torch.set_num_threads(1 if on_cpu and processes else threads)
    with companions(companion, processes - 1 if on_cpu else 0):
        points = list(engine_points(recipe, say))
    torch.set_num_threads(threads)
    alarms.logger.disabled = True  # these batches have made-up rewards and behavior logprobs, which would raise alarms
    try:
        timings = measure_train_steps(recipe, say)
    finally:
        alarms.logger.disabled = False
    hardware = gpu_types()[name]
    start = Efficiency(
        train=0.5, prefill=0.5, decode=0.5, decode_compute=0.5, step_overhead_s=1e-3, row_overhead_s=1e-5
    )
    place = DeviceClass(hardware, hardware.link_bytes_per_s, hardware.link_bytes_per_s, 0.0, start)
    found, shown = fit(spec, recipe_workload(recipe), place, devices, [*points, *timings.train])
    fitted = msgspec.structs.replace(place, efficiency=found.model_copy(update={"handover_s": timings.handover_s}))
    engines = max(1, recipe.engine.processes)
    found, whole = with_rollout(spec, timings.lengths, fitted, engines, timings.rollout)
    found, in_run = with_whole_steps(recipe, name, found, num_steps, say)
    return Profile(name, devices, found, [*shown, whole, *in_run], found.publish_latency_s)


def write_calibration(found: Profile, path: Path) -> None:
    """Write the calibration file that `baton plan --calibration` reads."""
    tree: dict[str, Any] = {
        "notes": {
            "written_by": "baton profile",
            "device": f"{found.devices} × {found.gpu}",
            "cores": os.cpu_count() or 0,
            "torch": torch.__version__,
        },
        "efficiency": {found.gpu: found.efficiency.model_dump()},
        "measured": [msgspec.to_builtins(point) for point in found.points],
    }
    write_whole(path, tomli_w.dumps(tree).encode("utf-8"))


def _gpu_name(device: torch.device) -> str:
    if device.type == "cpu":
        return "CPU"
    return catalogue_name(torch.cuda.get_device_name(device), torch.cuda.get_device_properties(device).total_memory)


def catalogue_name(shown: str, memory_bytes: float) -> str:
    """Return the GPU type of the catalogue for the name that the driver reports and the device's memory, which may
    differ from the nominal memory by 10 %. Raises UserError unless exactly one type matches."""
    words = set(re.split(r"[\s-]+", shown.upper().replace("RTX ", "RTX")))
    sizes = {float(word.removesuffix("GB")) for word in words if re.fullmatch(r"\d+GB", word)}
    found = [
        name
        for name, gpu in gpu_types().items()
        if re.sub(r"-\d+$", "", name) in words  # in the catalogue, "-40" and "-80" state the memory
        and sizes <= {round(gpu.hbm_bytes / GB)}
        and abs(memory_bytes / gpu.hbm_bytes - 1) <= 0.1
    ]
    if len(found) != 1:
        raise UserError(f"--gpu: {shown} is not in the catalogue; give the most similar of {', '.join(gpu_types())}")
    return found[0]

"""How fast the simulator is: trajectories a minute on one core, and a run on 10,000 GPUs.

    python -m benchmarks.simulator.run [plain] [hub] [large] [laws]

`plain`: engines behind a queue, as `baton simulate --recipe` has them; the best of three. `hub`: eight
steps of the same work on eight workers of 64 slots, with every message and check of a run with faults, but without a
fault. `large`: 1,000 workers of eight H100 each and 2,000 GPUs that train, 50 asynchronous steps of 32,768
trajectories, leases and weights as a swarm has them.
`laws`: random bad days with every law checked at every event. Processor time; raw results: results/raw.json.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from baton.cost.efficiency import Efficiency
from baton.cost.generate import DeviceClass, replica_layers
from baton.rollout.settings import RolloutSettings
from baton.simulator.faults import FaultSettings, RandomSettings, draw_faults
from baton.simulator.inputs import EngineSpec, Setting, SwarmSpec
from baton.simulator.result import summarise
from baton.simulator.run import build, simulate
from baton.simulator.scripted_trajectories import TrajectoryWork
from baton.simulator.seeds import choices
from baton.simulator.simulation import RunOptions
from baton.simulator.timing import CostSpeed, FlatSpeed, TrainSpeed, kv_tokens
from baton.specs.cluster import gpu_types
from baton.specs.model import model_spec
from baton.specs.workload import WorkloadSettings, constant, lognormal
from baton.swarm.leases import LeaseRules
from benchmarks.machine import machine
from tests.simulator.violations import simulate_checked

HERE = Path(__file__).parent
SEVENTY_B = {
    "model_type": "llama",
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 28672,
    "vocab_size": 128256,
}


def plain(mode: str, *, is_swarm: bool = False) -> dict[str, Any]:
    """64 steps of 1,024 trajectories on two engines of 256 slots; with `is_swarm`, 8 steps on 8 workers of 64 slots."""
    rules = RolloutSettings(mode=mode, batch_groups=128, group_size=8).rules()  # type: ignore[arg-type]
    speed = FlatSpeed(0.01, 1e-5, 1e-9, 1e-6)
    setting = Setting(
        rules,
        (EngineSpec("a", 256, speed), EngineSpec("b", 256, speed)),
        TrajectoryWork(constant(64), lognormal(512, 1.0, 4096)),
        TrainSpeed(0.1, 1e-6, 0.0),
        publish_s=0.1,
        num_steps=64,
    )
    faults = []
    if is_swarm:
        rules = replace(rules, is_swarm=mode == "async")
        workers = tuple(EngineSpec(f"w{i}", 64, speed) for i in range(8))
        spec = SwarmSpec(LeaseRules(restarts=mode == "sync"), fetch_s=0.1)
        setting = replace(setting, rules=rules, engines=workers, swarm=spec, num_steps=8)
        faults = [FaultSettings(kind="join", at_s=1e6)]  # after the run: with faults, no message is left out
    times = []
    for seed in range(3):
        begin = time.process_time()
        simulate(setting, RunOptions(seed, faults))
        times.append(time.process_time() - begin)
    count = setting.num_steps * rules.batch_groups * rules.group_size
    return {
        "trajectories": count,
        "seconds": times,
        "trajectories_per_minute": count / min(times) * 60,
        "trajectories_per_minute_worst": count / max(times) * 60,
    }


def large() -> dict[str, Any]:
    """A 70 B model on 10,000 GPUs."""
    model, gpu = model_spec(SEVENTY_B, "70b"), gpu_types()["H100"]
    work = WorkloadSettings.model_validate(
        {
            "groups": 2048,
            "group_size": 16,
            "max_staleness": 4,
            "prompt_tokens": {"mean": 512},
            "output_tokens": {"kind": "lognormal", "mean": 6000, "cv": 1.0, "max": 32768},
        }
    ).build()
    place = DeviceClass(gpu, gpu.link_bytes_per_s, 5e10, 2e-5, Efficiency())
    layers = replica_layers(model, 1)
    speed = CostSpeed(model, work, place, 8, layers)
    room = kv_tokens(model, work, place, 8, layers)
    rules = RolloutSettings(mode="async", batch_groups=2048, group_size=16, max_staleness=4).rules()
    patient = LeaseRules(heartbeat_timeout_s=1e9, progress_timeout_s=1e9, starve_s=1e9)
    setting = Setting(
        replace(rules, is_swarm=True, max_lag=1),
        tuple(EngineSpec(f"replica {i}", 64, speed, room, num_gpus=8) for i in range(1000)),
        TrajectoryWork(work.prompt, work.output, 0.5),
        TrainSpeed(5.0, 1e-6, 0.0),
        publish_s=5.0,
        num_steps=50,
        swarm=SwarmSpec(patient, fetch_s=10.0, report_every_s=60.0, heartbeat_s=60.0, tick_s=60.0),
    )
    begin, wall = time.process_time(), time.monotonic()
    world = build(setting, RunOptions(0))
    record = world.run()
    seconds = time.process_time() - begin
    count = 50 * 2048 * 16
    result = summarise(setting, record)
    return {
        "gpus": 10_000,
        "trajectories": count,
        "tokens": record.generated,
        "events": world.clock.num_fired,
        "seconds": seconds,
        "wall_s": time.monotonic() - wall,
        "trajectories_per_minute": count / seconds * 60,
        "peak_memory_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
        "virtual_s": result.seconds,
        "step_s": result.step_s,
        "trainer_busy": result.trainer_busy,
        "staleness": result.staleness,
    }


def laws(days: int = 300) -> dict[str, Any]:
    """Bad days of a small swarm."""
    found: dict[str, Any] = {}
    for mode in ("sync", "partial", "async"):
        rules = RolloutSettings(mode=mode, batch_groups=4, group_size=2).rules()  # type: ignore[arg-type]
        leases = LeaseRules(
            restarts=mode == "sync", heartbeat_timeout_s=6, progress_timeout_s=10, starve_s=30, backup_lease_after_s=2
        )
        setting = Setting(
            replace(rules, is_swarm=mode == "async"),
            tuple(EngineSpec(f"w{i}", 4, FlatSpeed(0.02, 1e-4, 1e-8, 1e-5)) for i in range(3)),
            TrajectoryWork(constant(16), lognormal(60, 1.0, 400), 0.5),
            TrainSpeed(0.5, 1e-6, 0.0),
            publish_s=0.1,
            num_steps=8,
            checkpoint_every=3,
            swarm=SwarmSpec(leases, report_every_s=1.0, heartbeat_s=1.0, fetch_s=0.3),
        )
        begin = time.process_time()
        for seed in range(days):
            day = draw_faults(choices(seed, "faults"), RandomSettings(faults=6, until_s=40.0))
            simulate_checked(setting, RunOptions(seed, [*day, FaultSettings(kind="join", at_s=200.0)]))
        found[mode] = {"days": days, "days_per_minute": days / (time.process_time() - begin) * 60}
    return found


def main() -> None:
    """Run what is asked for, and keep the other results."""
    asked = sys.argv[1:] or ["plain", "hub", "laws", "large"]
    path = HERE / "results" / "raw.json"
    raw = json.loads(path.read_text()) if path.exists() else {}
    raw["machine"] = machine()
    if "plain" in asked:
        raw["plain"] = {mode: plain(mode) for mode in ("sync", "partial", "async")}
    if "hub" in asked:
        modes = {mode: plain(mode, is_swarm=True) for mode in ("sync", "partial", "async")}
        raw["hub"] = {"machine": machine()} | modes
    if "laws" in asked:
        raw["laws"] = laws()
    if "large" in asked:
        raw["large"] = large()
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(raw, indent=1) + "\n")
    print(json.dumps(raw, indent=1))


if __name__ == "__main__":
    main()

"""What APRIL, AReaL, Echo-2 and LlamaRL report, simulated: docs/papers.md has the tables.

python -m benchmarks.simulator.papers [april] [areal] [echo] [llamarl]     # two minutes; raw: results/papers.json
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from baton.cost.efficiency import RatesSettings
from baton.planner.problem import Inputs
from baton.planner.solve import make_plan
from baton.rollout.settings import RolloutSettings, Rules
from baton.simulator.input_sources import PlanSource, SimulationOptions
from baton.simulator.inputs import EngineSpec, Setting, SwarmSpec
from baton.simulator.result import Result, summarise
from baton.simulator.run import simulate
from baton.simulator.scripted_trajectories import TrajectoryWork
from baton.simulator.simulation import RunOptions
from baton.simulator.timing import FlatSpeed, TrainSpeed
from baton.specs.model import read_model
from baton.specs.workload import Workload, WorkloadSettings, constant, lognormal
from baton.swarm.leases import LeaseRules
from baton.swarm.provisioning import Provisioning
from benchmarks.areal_hex.run import HERE as HEX
from benchmarks.areal_hex.run import cluster
from benchmarks.machine import machine

HERE = Path(__file__).parent


def run(setting: Setting) -> Result:
    """Simulate, and make sense of it."""
    return summarise(setting, simulate(setting, RunOptions(0)))


def rules(**keys: object) -> Rules:
    """Of 32 groups of 8, unless it says otherwise."""
    return RolloutSettings.model_validate({"batch_groups": 32, "group_size": 8, **keys}).rules()


def april() -> list[dict[str, Any]]:
    """Rollout tokens per second over `sync`: by tail, over-provision, and how much an engine gains from width.

    `memory`: a step takes as long whatever its width (large model, small batch); `compute`: it grows with every row.
    Training takes no time, as in APRIL's own figure. The control is `sync` with as many groups as are kept open.
    `prefill_token_s`: seconds to prefill a token, of prompts and of resumed responses. 3e-5 is a 7B model in bfloat16
    at 450 TFLOP/s; 0 shows the scheduling alone.
    """
    found = []
    for bound, base_s, row_s, token_s in (
        (bound, base_s, row_s, token_s)
        for bound, base_s, row_s in (("memory", 0.02, 1e-6), ("both", 0.01, 4e-5), ("compute", 0.001, 8e-5))
        for token_s in (0.0, 3e-5)
    ):
        speed = FlatSpeed(base_s, row_s, token_s=token_s)
        for cv in (0.3, 0.6, 1.0, 1.5):
            base = Setting(
                rules(),
                (EngineSpec("e", 1024, speed),),
                TrajectoryWork(constant(200), lognormal(1000, cv, 16384), 0.5),
                TrainSpeed(0.0, 0.0, 0.0),
                num_steps=40,
            )
            sync = run(base)
            for alpha in (1.25, 1.5, 2.0, 3.0):
                partial = run(replace(base, rules=rules(mode="partial", overprovision=alpha, max_staleness=4)))
                control = run(replace(base, rules=rules(batch_groups=int(32 * alpha))))
                found.append(
                    {
                        "bound": bound,
                        "prefill_token_s": token_s,
                        "cv": cv,
                        "overprovision": alpha,
                        "over_sync": partial.generated_tokens_per_s / sync.generated_tokens_per_s,
                        "over_control": partial.generated_tokens_per_s / control.generated_tokens_per_s,
                        "masked": partial.masked_share,
                        "mean_staleness": partial.mean_staleness,
                    }
                )
    return found


def areal() -> list[dict[str, Any]]:
    """Throughput by η over that at η = 16, at three balances of training and generation; 64 groups of 16."""
    found = []
    for balance in (0.5, 0.8, 1.0):
        base = Setting(
            rules(),
            tuple(EngineSpec(f"e{i}", 256, FlatSpeed(0.02, 2e-5)) for i in range(4)),
            TrajectoryWork(constant(200), lognormal(2000, 0.8, 8192), 0.5),
            TrainSpeed(0.0, 0.0, 0.0),
            publish_s=1.0,
            num_steps=40,
        )
        per_s = 4 * 256 / base.engines[0].speed.step_s(256, 0.0)
        train_s = balance * 64 * 16 * 2000 / per_s
        rates = {}
        for bound in (0, 1, 2, 4, 8, 16):
            keys: dict[str, object] = {"mode": "async", "batch_groups": 64, "group_size": 16, "max_staleness": bound}
            result = run(replace(base, rules=rules(**keys), train=TrainSpeed(train_s, 0.0, 0.0)))
            rates[bound] = result.trained_tokens_per_s, result.mean_staleness
        found += [
            {"train_over_generate": balance, "eta": eta, "of_best": rate / rates[16][0], "mean_staleness": staleness}
            for eta, (rate, staleness) in rates.items()
        ]
    return found


def echo() -> list[dict[str, Any]]:
    """The share of time in which the trainer waits, by the number of workers: simulated, and by the provisioning rule.

    `max_lag` κ: workers get leases while they fetch a version, so T_broadcast is 0. `max_lag` 0: they get none until
    they have fetched it (4 s, and 12 s on a slower link), which is T_broadcast.
    """
    speed, found = FlatSpeed(0.02, 1e-4), []
    cases = [(every, lag, 4.0) for every in (1, 2, 4) for lag in (every, 0)]
    for every, lag, fetch_s in [*cases, (2, 0, 12.0), (4, 0, 12.0)]:
        for workers in (2, 3, 4, 5, 6, 8):
            own = replace(rules(mode="async", batch_groups=16, max_staleness=16), is_swarm=True, max_lag=lag)
            setting = Setting(
                own,
                tuple(EngineSpec(f"w{i}", 16, speed) for i in range(workers)),
                TrajectoryWork(constant(64), lognormal(300, 0.8, 2048), 0.5),
                TrainSpeed(12.0, 0.0, 0.0),
                num_steps=60,
                publish_every=every,
                swarm=SwarmSpec(LeaseRules(backup_lease_factor=0.0), fetch_s=fetch_s, report_every_s=5.0),
            )
            result = run(setting)
            per_s = workers * 16 / (300 * speed.step_s(16, 0.0))
            rule = Provisioning(every, 12.0, 0.0 if lag else fetch_s, 128, per_s)
            found.append(
                {
                    "publish_every": every,
                    "max_lag": lag,
                    "fetch_s": fetch_s,
                    "workers": workers,
                    "supply_over_need": per_s * 12.0 / 128,
                    "idle": 1 - result.trainer_busy,
                    "idle_by_rule": rule.idle_share,
                }
            )
    return found


def llamarl() -> list[dict[str, Any]]:
    """Step time of equal GPUs by their number, planned and simulated, over the closed form's.

    A GPU trains 3.7 times as many tokens a second as it generates. With B tokens a step and rates t and g of N GPUs the
    best step is B·(1/t + 1/g)/N (LlamaRL's T*), and g/(t + g) of them train. The batch grows with the cluster.
    """
    train, rollout = 3700.0, 1000.0
    rates = RatesSettings.model_validate({"rates": {"H800-paper": {"train": train, "rollout": rollout}}})
    model, found = read_model(HEX / "models" / "r1-distill-qwen-1.5b"), []
    for number in (8, 16, 32, 64):
        load = WorkloadSettings.model_validate(
            {
                "groups": 8 * number,
                "group_size": 8,
                "max_staleness": 4,
                "prompt_tokens": {"mean": 1e-6},
                "output_tokens": {"mean": 200},
            }
        ).build()
        asked = Inputs(cluster(number, 0), model, load, rates=rates)
        plan = make_plan(asked)
        best_s = load.output_tokens * (1 / train + 1 / rollout) / number
        row: dict[str, Any] = {
            "gpus": number,
            "train": len(plan.training.gpu_ids),
            "share_of_closed_form": number * rollout / (train + rollout),
            "closed_form_s": best_s,
            "planned": plan.breakdown.step_s / best_s,
        }
        for name, lengths in (("simulated", load.output), ("simulated_with_tail", lognormal(200, 1.0, 2000))):
            work: Workload = msgspec.structs.replace(load, output=lengths)
            setting = PlanSource(plan, model, work, cluster=asked.cluster).setting(SimulationOptions(steps=16))
            row[name] = run(setting).step_s / best_s
        found.append(row)
    return found


def main() -> None:
    """Simulate what is asked for, and keep the other results."""
    path = HERE / "results" / "papers.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    papers = {"april": april, "areal": areal, "echo": echo, "llamarl": llamarl}
    found = {name: papers[name]() for name in sys.argv[1:] or papers}
    path.write_text(json.dumps({**known, **found, "machine": machine()}, indent=1) + "\n")
    for name, rows in found.items():
        print(name)
        for row in rows:
            print("  " + "  ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()))


if __name__ == "__main__":
    main()

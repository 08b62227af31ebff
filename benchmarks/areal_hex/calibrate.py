"""Fit what GPUs achieve to the entries of `measurements.toml` whose split is `fit`, and report the error on `test`.

python -m benchmarks.areal_hex.calibrate      # some seconds, no GPU; writes results/calibration.json

The values go by hand into baton/specs/catalogue/achieved.toml. Where sources disagree, the 1.5B row of Table 1 sets the
value and the other sources set its range.
"""

from __future__ import annotations

import json
import math
import tomllib
from typing import Any

import msgspec
import numpy as np

from baton.cost.efficiency import Efficiency
from baton.cost.generate import DeviceClass, decode_s, largest_batch, prefill_s, replica_cost
from baton.cost.train import forward_passes, layer_flops
from baton.recipe.workload import read_workload
from baton.specs.cluster import gpu_types
from baton.specs.model import ModelSpec, model_spec, read_model
from baton.specs.workload import Workload, constant, lognormal
from benchmarks.areal_hex.planned import WORKLOAD
from benchmarks.areal_hex.run import HERE


def config(kind: str, layers: int, hidden: int, heads: int, ffn: int, vocab: int, *, tied: bool = False) -> ModelSpec:
    """Return a model with 8 KV heads of 128."""
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "vocab_size": vocab}
    heads_of = {"num_key_value_heads": 8, "head_dim": 128, "intermediate_size": ffn, "tie_word_embeddings": tied}
    return model_spec({"model_type": kind, **sizes, **heads_of}, kind)


MODELS = {
    "qwen3-0.6b": config("qwen3", 28, 1024, 16, 3072, 151_936, tied=True),
    "qwen3-8b": config("qwen3", 36, 4096, 32, 12_288, 151_936),
    "qwen3-14b": config("qwen3", 40, 5120, 40, 17_408, 151_936),
    "llama-3.1-8b": config("llama", 32, 4096, 32, 14_336, 128_256),
    **{size: read_model(HERE / "models" / f"r1-distill-qwen-{size}") for size in ("1.5b", "7b", "14b")},
}
GPUS = gpu_types()


def device(gpu: str, found: dict[str, float]) -> DeviceClass:
    """Return a GPU with achieved rates; shares refer to the catalogue's peaks."""
    return DeviceClass(GPUS[gpu], GPUS[gpu].link_bytes_per_s, 5e9, 2e-5, Efficiency().model_copy(update=found))


def work_of(prompt: float, output: float, longest: float, cv: float) -> Workload:
    """Return a workload of these lengths."""
    lengths = lognormal(output, cv, longest) if cv else constant(output)
    return Workload("", 512, 16, constant(prompt), lengths)


def decode(data: dict[str, Any], cv: float) -> dict[str, float]:
    """Fit the bandwidth share and the time per step to the decode times of an H100."""
    points = data["decode"]["points"]

    def rms(share: float, step_s: float) -> float:
        place = device("H100", {"decode": share, "step_overhead_s": step_s})
        total = 0.0
        for name, batch, mean, ms, _ in points:
            model, context = MODELS[name], data["decode"]["prompt"] + mean * (1 + cv * cv) / 2
            predicted_s = decode_s(model, work_of(1, mean, mean, 0), place, 1, (model.num_layers,), batch, context)
            total += math.log(predicted_s / (ms / 1000)) ** 2
        return math.sqrt(total / len(points))

    grid = [(share, ms / 1000) for share in np.arange(0.5, 1.0, 0.005) for ms in np.arange(0, 5, 0.05)]
    share, step_s = min(grid, key=lambda each: rms(*each))
    return {"decode": float(share), "step_overhead_s": float(step_s), "rms_error": rms(share, step_s)}


def row_overhead_s(entry: dict[str, Any], found: dict[str, float]) -> float:
    """Return the time per request and step with which the model reaches the measured tokens per second."""
    model, requests = MODELS[entry["model"]], entry["requests"]
    work = work_of(entry["prompt"], entry["output"], entry["output"], 0)
    place = device(entry["gpu"], found)
    context = entry["prompt"] + entry["output"] / 2
    step_s = decode_s(model, work, place, 1, (model.num_layers,), requests, context)
    prompt_s = prefill_s(model, place, 1, (model.num_layers,), entry["prompt"], entry["prompt"] ** 2)
    measured_s = requests / entry["tokens_per_s"]
    return max(0.0, (measured_s - step_s - requests * prompt_s / entry["output"]) / requests)


def single(entry: dict[str, Any]) -> list[float]:
    """Return the bytes per second at which one sequence's keys and values are read, from each row after the first."""
    model, output = MODELS[entry["model"]], entry["output"]
    times = [(prompt, (prompt + output) / speed) for prompt, speed in entry["points"]]
    found = []
    for prompt, seconds in times[1:]:
        place = device(entry["gpu"], {"prefill": 120 / 148})
        prefill = prefill_s(model, place, 1, (model.num_layers,), prompt, prompt**2)
        read = output * prompt * model.kv_bytes_per_token(2)
        found.append(read / (seconds - times[0][1] - prefill))
    return found


def rollout_rate(size: str, work: Workload, place: DeviceClass) -> float:
    """Return tokens per second and GPU of the best replica with its largest batch."""
    best = 0.0
    for tp in (1, 2):
        batch = largest_batch(MODELS[size], work, place, tp, 1)
        if batch:
            best = max(best, replica_cost(MODELS[size], work, place, tp, 1, batch).tokens_per_s / tp)
    return best


def train_rate(size: str, work: Workload, place: DeviceClass) -> float:
    """Return trained output tokens per second and GPU, without communication."""
    model = MODELS[size]
    flops = model.num_layers * layer_flops(model, work) + work.trained_tokens * model.head_flops_per_token
    step_s = forward_passes(work, place.efficiency.backward) * flops / (place.gpu.flops * place.efficiency.train)
    return work.output_tokens / step_s


def only(entries: list[dict[str, Any]], **wanted: str) -> dict[str, Any]:
    """Return the single fit entry with these values."""
    (found,) = [e for e in entries if e["split"] == "fit" and all(e[key] == value for key, value in wanted.items())]
    return found


def fit(data: dict[str, Any], work: Workload) -> tuple[dict[str, dict[str, float]], dict[str, Any]]:
    """Return the efficiencies of H800 and H20, and what was learned on the way."""
    decoded = decode(data, data["decode"]["cv"])
    spread = [decode(data, cv)["decode"] for cv in (0.4, 1.0)]
    of_h100 = {key: decoded[key] for key in ("decode", "step_overhead_s")}
    row_s = row_overhead_s(data["serving"][0], of_h100)
    tflops = only(data["train"], gpu="H800")["tflops"]
    # the memory of an H800 is that of an H100
    share = decoded["decode"] * GPUS["H100"].hbm_bytes_per_s / GPUS["H800"].hbm_bytes_per_s
    overheads = {"step_overhead_s": decoded["step_overhead_s"], "row_overhead_s": row_s}
    h800 = {"train": tflops * 1e12 / GPUS["H800"].flops, "decode": share, **overheads}
    slower = only(data["ratio"], what="train", model="1.5b")["value"]
    h20 = {"train": tflops * 1e12 / slower / GPUS["H20"].flops, **overheads}
    target = only(data["ratio"], what="rollout", model="1.5b")["value"]
    steady = rollout_rate("1.5b", work, device("H800", h800))

    def off(decode_share: float) -> float:
        return rollout_rate("1.5b", work, device("H20", {**h20, "decode": decode_share})) / steady - target

    low, high = 0.2, 1.0
    for _ in range(40):
        low, high = ((low + high) / 2, high) if off((low + high) / 2) < 0 else (low, (low + high) / 2)
    h20["decode"] = high
    over = only(data["ratio"], what="train over rollout")["value"]
    rollout = train_rate("1.5b", work, device("H800", h800)) / steady / over
    nemo = only(data["run"], gpu="H100")
    theirs = work_of(200, nemo["sequence"] - 200, nemo["longest"], 0.7)
    place = device("H100", {**of_h100, "row_overhead_s": row_s})
    batch = nemo["trajectories"] // (nemo["gpus"] // 2)
    reached = nemo["trajectories"] * (nemo["sequence"] - 200) / nemo["step_s"] / (nemo["gpus"] / 2)
    shares = {"Table 1, 1.5B": rollout}
    shares["NeMo RL"] = reached / replica_cost(MODELS["llama-3.1-8b"], theirs, place, 1, 1, batch).tokens_per_s
    for run in data["run"][1:]:
        shares[run["source"].split(",")[0]] = run["tokens_per_s"] / run["gpus"] / 0.75 / steady
    learned = {
        "decode_rms_error": decoded["rms_error"],
        "decode_share_by_cv": spread,
        "row_overhead_s": row_s,
        "h20_single_gb_per_s": [value / 1e9 for value in single(data["single"][0])],
        "rollout_shares": shares,
        "steady_tokens_per_s": {"H800": steady},
    }
    return {"H800": {**h800, "rollout": rollout}, "H20": {**h20, "rollout": rollout}}, learned


def held_back(data: dict[str, Any], found: dict[str, dict[str, float]], work: Workload) -> dict[str, dict[str, float]]:
    """Return predicted over measured, minus 1, of the ratios of Table 1 that were not used."""
    errors = {}
    for size, (rollout, train, over) in ((k, v) for k, v in data["test"]["table_1"].items() if k != "split"):
        places = {gpu: device(gpu, found[gpu]) for gpu in ("H800", "H20")}
        speed = {gpu: rollout_rate(size, work, place) for gpu, place in places.items()}
        learn = {gpu: train_rate(size, work, place) for gpu, place in places.items()}
        errors[size] = {
            "rollout H20 : H800": speed["H20"] / speed["H800"] / rollout - 1,
            "train H800 : H20": learn["H800"] / learn["H20"] / train - 1,
            "H800 train : rollout": learn["H800"] / speed["H800"] / over - 1,
        }
    return errors


def main() -> None:
    """Fit, print and write."""
    data = tomllib.loads((HERE / "measurements.toml").read_text(encoding="utf-8"))
    work = msgspec.structs.replace(read_workload(WORKLOAD), shared_prefill=True)
    found, learned = fit(data, work)
    scale = {"train": ("TFLOP/s", "flops", 1e12), "decode": ("GB/s", "hbm_bytes_per_s", 1e9)}
    achieved = {
        gpu: {f"{key} {unit}": values[key] * getattr(GPUS[gpu], peak) / by for key, (unit, peak, by) in scale.items()}
        for gpu, values in found.items()
    }
    result = {"efficiency": found, "achieved": achieved, "learned": learned, "test": held_back(data, found, work)}
    print(json.dumps(result, indent=1))
    (HERE / "results" / "calibration.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

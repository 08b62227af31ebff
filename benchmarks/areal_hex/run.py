"""The planner beside AReaL-Hex's tables: its four clusters, three models, Table 1 rates.

python -m benchmarks.areal_hex.run [--out benchmarks/areal_hex/results/table.json]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import msgspec

from baton.cost.efficiency import RatesSettings
from baton.planner.problem import Inputs
from baton.planner.rental import OffersSettings, rent_for_target
from baton.planner.solve import make_plan
from baton.specs.cluster import Cluster, ClusterSettings
from baton.specs.model import read_model
from baton.specs.plan import Method
from baton.specs.workload import Workload, WorkloadSettings

HERE = Path(__file__).parent
LINKS = {"inter_node_gb_per_s": 5, "cross_type_gb_per_s": 1.5}
PRICES = {"H800-paper": 5.28, "H20-paper": 1.85}
TABLE_1 = {
    # price per token (inference, training) of H800 and H20; rate = price of the GPU over price of a token
    "1.5b": {"H800-paper": (5.58e-3, 1.66e-3), "H20-paper": (2.06e-3, 5.16e-3)},
    "7b": {"H800-paper": (1.14e-2, 3.05e-3), "H20-paper": (4.15e-3, 9.51e-3)},
    "14b": {"H800-paper": (3.43e-2, 0.99e-2), "H20-paper": (1.27e-2, 3.10e-2)},
}
TABLE_2 = {"1.5b": (4.75, 10.06), "7b": (14.79, 58.34), "14b": (26.00, 112.93)}
"""Weight sync, seconds: 24 H800, and the mixed cluster."""
HOMOGENEOUS = {"1.5b": (18_401, 144.9), "7b": (5_980, 405.4), "14b": (2_160, 1051.5)}
"""24 H800, measured: tokens/s (figure 3), and the slower side of a step in seconds (figure 4)."""
MEASURED = {
    # tokens/s of 24 (8+16), 32 (8+24), 40 (8+32) and 56 (8+48) GPUs: figure 5, its bars in the order of its text
    "1.5b": (14.2e3, 17.9e3, 23.0e3, 25.1e3),
    "7b": (4.89e3, 6.00e3, 6.56e3, 7.82e3),
    "14b": (1.90e3, 2.31e3, 2.49e3, 3.25e3),
}
CLUSTERS = ((8, 16), (8, 24), (8, 32), (8, 48))


def cluster(h800: int, h20: int) -> Cluster:
    """Return a cluster of machines of eight."""
    nodes = [{"gpu": g, "gpus": 8, "count": n // 8} for g, n in (("H800-paper", h800), ("H20-paper", h20)) if n]
    return ClusterSettings.model_validate({"name": f"{h800} H800 + {h20} H20", "links": LINKS, "nodes": nodes}).build()


def workload() -> Workload:
    """All tokens are output tokens, as the paper counts them; how many does not change a ratio without sync."""
    given = {"groups": 512, "group_size": 16, "prompt_tokens": {"mean": 1e-6}, "output_tokens": {"mean": 300}}
    # the paper's trainer: with rates, that of Baton trains on one GPU type
    return msgspec.structs.replace(WorkloadSettings.model_validate(given).build(), trainer="idealised")


def rates(size: str, scale: float = 1.0, sync_s: float = 0.0, cross_sync_s: float = 0.0) -> RatesSettings:
    """Return table 1 as tokens per second and GPU, times a factor."""
    table = {
        gpu: {"rollout": PRICES[gpu] / infer * scale, "train": PRICES[gpu] / train * scale}
        for gpu, (infer, train) in TABLE_1[size].items()
    }
    return RatesSettings.model_validate({"rates": table, "sync_s": sync_s, "cross_sync_s": cross_sync_s})


def question(size: str, of: Cluster, table: RatesSettings, *, crossing: bool = True) -> Inputs:
    """Return the planner's inputs."""
    model = read_model(HERE / "models" / f"r1-distill-qwen-{size}")
    return Inputs(of, model, workload(), rates=table, cross_types=crossing)


def throughput(
    size: str, of: Cluster, table: RatesSettings, method: Method = "exact", *, crossing: bool = True
) -> float:
    """Return predicted tokens per second."""
    return make_plan(question(size, of, table, crossing=crossing), method).tokens_per_s


def scaled(size: str) -> RatesSettings:
    """Return table 1 on the scale of figures 3 and 4: 24 H800 take the measured time for a step of the measured
    tokens."""
    speed, slower_s = HOMOGENEOUS[size]
    own, mixed = TABLE_2[size]
    tokens = speed * (slower_s + own)
    plain = throughput(size, cluster(24, 0), rates(size))
    per_step = workload().trained_tokens
    # a step of `tokens` in slower_s seconds; ours has `per_step` tokens, so that sync is scaled to it as well
    scale = tokens / slower_s / plain
    shrink = per_step / tokens
    return rates(size, scale, own * shrink, mixed * shrink)


def row(size: str, place: int) -> dict[str, object]:
    """Return one line of the table."""
    of = cluster(*CLUSTERS[place])
    plain, with_sync = rates(size), scaled(size)
    base, base_sync = throughput(size, cluster(24, 0), plain), throughput(size, cluster(24, 0), with_sync)
    plan = make_plan(question(size, of, plain))
    train = {stage.gpu: len(stage.gpu_ids) for stage in plan.training.stages}
    return {
        "model": size,
        "cluster": of.name,
        "price_per_h": round(of.price_per_h, 2),
        "trains": train,
        "exact": plan.tokens_per_s / base,
        "exact_with_sync": throughput(size, of, with_sync) / base_sync,
        "one_type_trains": throughput(size, of, plain, crossing=False) / base,
        "one_type_trains_with_sync": throughput(size, of, with_sync, crossing=False) / base_sync,
        "paper_method": throughput(size, of, plain, "paper") / base,
        "measured": MEASURED[size][place] / HOMOGENEOUS[size][0],
    }


def cheapest(size: str) -> dict[str, object]:
    """Return the cheapest mix of machines that reaches the throughput of 24 H800, and what it saves."""
    offers = OffersSettings.model_validate(
        {
            "links": LINKS,
            "offers": [{"gpu": "H800-paper", "max_nodes": 4}, {"gpu": "H20-paper", "max_nodes": 12}],
        }
    )
    found = {}
    for name, table in (("without sync", rates(size)), ("with sync", scaled(size))):
        asked = question(size, cluster(24, 0), table)
        choice = rent_for_target(asked, offers, make_plan(asked).tokens_per_s)
        found[name] = {
            "gpus": choice.inputs.cluster.count(),
            "price_per_h": round(choice.plan.price_per_h, 2),
            "cost_ratio": 126.72 / choice.plan.price_per_h,
        }
    return {"model": size, **found}


def main() -> None:
    """Print the tables and write them as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=HERE / "results" / "table.json")
    out = parser.parse_args().out
    rows = [row(size, place) for size in TABLE_1 for place in range(len(CLUSTERS))]
    print("throughput over that of 24 H800 ($126.72 in the paper's unit)")
    columns = ("exact", "exact_with_sync", "one_type_trains", "one_type_trains_with_sync", "paper_method", "measured")
    print(f"{'model':6}{'cluster':18}{'price':>8}", *(f"{name[-16:]:>17}" for name in columns))
    for r in rows:
        print(f"{r['model']:6}{r['cluster']:18}{r['price_per_h']:8}", *(f"{r[name]:17.2f}" for name in columns))
    saved = [cheapest(size) for size in TABLE_1]
    print("cheapest machines of eight that reach 24 H800; the paper: 8 H800 + 24 H20, cost ratio 1.46")
    for s in saved:
        print(s)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"ratios": rows, "equal_throughput": saved}, indent=2) + "\n")


if __name__ == "__main__":
    main()

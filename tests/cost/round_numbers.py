"""A model, a GPU and a workload of round numbers, for costs worked by hand."""

from __future__ import annotations

from baton.cost.efficiency import Efficiency
from baton.cost.generate import DeviceClass
from baton.specs.cluster import Gpu
from baton.specs.model import ModelSpec
from baton.specs.workload import Workload, constant

MODEL = ModelSpec(
    name="round",
    num_layers=10,
    hidden=100,
    num_heads=8,
    num_kv_heads=2,
    head_dim=10,
    vocab=1000,
    is_tied=False,
    attention_params=4e5,
    ffn_params=6e5,
    active_ffn_params=6e5,
    other_params=0,
    kv_values_per_token=40,
)
"""10 layers of 10⁶ parameters, two vocabulary matrices of 10⁵: 10.2 · 10⁶ parameters."""
GPU = Gpu(name="round", flops=1e12, hbm_bytes_per_s=1e10, hbm_bytes=1e8, link_bytes_per_s=1e9, price_per_h=1)
IDEAL = Efficiency(
    train=1, prefill=1, decode_compute=1, decode=1, step_overhead_s=0, link=1, publish=1, publish_latency_s=0, memory=1
)
PLACE = DeviceClass(GPU, 1e9, 1e8, 0.0, IDEAL)
WORK = Workload("w", groups=10, group_size=10, prompt=constant(100), output=constant(200))

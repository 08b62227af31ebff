"""Clusters and GPUs: the catalogue is whole and sourced, a TOML that is wrong says where."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from baton.errors import UserError
from baton.specs.cluster import ClusterSettings, catalogue, gpu_types

LINKS = {"inter_node_gb_per_s": 5, "cross_type_gb_per_s": 1.5}
WANTED = {
    *("H100", "H800", "H800-paper", "H200", "H20", "H20-paper", "A100-40", "A100-80", "A800", "L40S", "L20", "L4"),
    *("A10", "RTX4090", "RTX5090", "MI300X", "CPU"),
}


def build(**changes: object) -> ClusterSettings:
    return ClusterSettings.model_validate({"name": "x", "links": LINKS, "nodes": [{"gpu": "H800"}], **changes})


def refused(**changes: object) -> str:
    with pytest.raises((ValidationError, UserError)) as caught:
        build(**changes)
    return str(caught.value)


def test_the_catalogue_has_every_gpu_with_the_source_of_its_figures() -> None:
    assert set(catalogue()) == WANTED
    for name, gpu in catalogue().items():
        assert gpu.source, f"{name} has no source"
        assert gpu.price_source, f"{name} has no source of its price"


def test_the_paper_profile_of_the_h800_differs_from_the_data_sheet() -> None:
    gpus = gpu_types()
    assert (gpus["H800-paper"].flops, gpus["H800-paper"].hbm_bytes_per_s) == (756e12, 2e12)
    assert (gpus["H800"].flops, gpus["H800"].hbm_bytes_per_s) == (989e12, 3430.4e9)


@pytest.mark.parametrize(
    ("h800", "h20", "price"),
    # 24·5.28; 8·5.28 + 24·1.85; 8·5.28 + 48·1.85; 32·5.28; 88·1.85; 24·(5.28 + 1.85): the paper's clusters
    [(24, 0, 126.72), (8, 24, 86.64), (8, 48, 131.04), (32, 0, 168.96), (0, 88, 162.80), (24, 24, 171.12)],
)
def test_prices_add_up_to_those_of_the_paper(h800: int, h20: int, price: float) -> None:
    nodes = [{"gpu": g, "count": n // 8} for g, n in (("H800-paper", h800), ("H20-paper", h20)) if n]
    cluster = build(nodes=nodes).build()
    assert cluster.price_per_h == pytest.approx(price)
    assert cluster.currency == "L20"


def test_nodes_are_named_and_linked() -> None:
    cluster = build(
        nodes=[{"gpu": "H800", "count": 2}, {"gpu": "H20", "gpus": 4, "name": "cheap"}],
        links={
            **LINKS,
            "between": [{"ends": ["H800", "H20"], "gb_per_s": 2}, {"ends": ["h800-0", "h800-1"], "gb_per_s": 9}],
        },
    ).build()
    assert [node.name for node in cluster.nodes] == ["h800-0", "h800-1", "cheap"]
    assert cluster.nodes[2].gpu_ids == ("cheap:0", "cheap:1", "cheap:2", "cheap:3")
    assert (cluster.bytes_per_s[0][1], cluster.bytes_per_s[0][2], cluster.bytes_per_s[2][0]) == (9e9, 2e9, 2e9)
    assert cluster.count() == {"H800": 16, "H20": 4}


def test_a_gpu_of_ones_own_and_a_changed_one() -> None:
    own = {"bf16_tflops": 10, "hbm_gb_per_s": 100, "hbm_gb": 12, "link_gb_per_s": 8, "price_per_hour": 0.1}
    cluster = build(nodes=[{"gpu": "Mine"}, {"gpu": "H20"}], gpu={"Mine": own, "H20": {"price_per_hour": 2}}).build()
    assert cluster.nodes[0].gpu.flops == 10e12
    assert (cluster.nodes[1].price_per_gpu_h, cluster.nodes[1].gpu.hbm_bytes) == (2, 96e9)


def test_what_is_wrong_is_named_with_what_is_allowed() -> None:
    assert "did you mean 'H800'" in refused(nodes=[{"gpu": "H80"}])
    assert "nodes.0.gpu" in refused(nodes=[{"gpu": "H80"}])
    assert "links.inter_node_gb_per_s is missing" in refused(nodes=[{"gpu": "H20", "count": 2}], links={})
    assert "links.cross_type_gb_per_s is missing" in refused(nodes=[{"gpu": "H20"}, {"gpu": "H800"}], links={})
    assert "greater than 0" in refused(links={"inter_node_gb_per_s": -5})
    assert "greater than 0" in refused(nodes=[{"gpu": "H20", "price_per_gpu_hour": 0}])
    assert "two machines are named 'h20'" in refused(nodes=[{"gpu": "H20"}, {"gpu": "H20"}])
    assert "hbm_gb" in refused(nodes=[{"gpu": "Mine"}], gpu={"Mine": {"bf16_tflops": 10}})
    assert "L20 and in USD" in refused(nodes=[{"gpu": "H20"}, {"gpu": "H800-paper"}])
    between = [{"ends": ["H800", "H20"], "gb_per_s": 2}, {"ends": ["H20", "H800"], "gb_per_s": 3}]
    contradicting = refused(nodes=[{"gpu": "H20"}, {"gpu": "H800"}], links={**LINKS, "between": between})
    assert "links.between.1" in contradicting
    assert "earlier entry has 2" in contradicting
    stranger = [{"ends": ["H800", "B300"], "gb_per_s": 2}]
    assert "allowed are two GPU types (H800)" in refused(links={**LINKS, "between": stranger})

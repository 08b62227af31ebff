"""What Ray says of its machines, as the planner's cluster file."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from ray_rows import row

from baton.cluster.inventory import as_toml, describe, machines
from baton.errors import UserError
from baton.recipe.workload import read_cluster
from baton.specs.cluster import ClusterSettings


def test_types_come_from_the_operators_word_then_from_rays_and_a_core_is_a_device() -> None:
    found = {
        m.name: m
        for m in machines(
            [
                row("own", GPU=8, CPU=64, accelerator_type__H100=1, gpu_type_H800=8),
                row("ray", GPU=4, CPU=32, accelerator_type__H100=1),
                row("label", GPU=2, CPU=8, labels={"ray.io/accelerator-type": "A100-80G"}),
                row("cores", CPU=16),
                row("fake", CPU=2, gpu_type_l20=2),
            ]
        )
    }
    assert {name: (m.gpu, m.num_gpus, m.units) for name, m in found.items()} == {
        "own": ("H800", 8, ("gpu_type_H800", "GPU")),
        "ray": ("H100", 4, ("GPU",)),
        "label": ("A100-80", 2, ("GPU",)),
        "cores": ("CPU", 16, ("CPU",)),
        "fake": ("L20", 2, ("gpu_type_l20",)),
    }


def test_machines_that_cannot_be_planned_with_are_named_with_a_way_out() -> None:
    found = machines([row("a", GPU=8, CPU=8), row("b", GPU=2, gpu_type_FOO=2), row("c", CPU=0), row("d", CPU=4, GPU=1)])
    with pytest.raises(UserError, match=r"a is not used: Ray does not report the type of its 8 GPUs.*gpu_type_NAME"):
        describe(found, name="x")
    one_good = machines([row("a", GPU=8), row("b", GPU=2, gpu_type_FOO=2), row("e", GPU=1, accelerator_type__L4=1)])
    described = describe(one_good, name="x")
    assert [node.name for node in described.settings.nodes] == ["e"]
    assert [note.split(" ")[0] for note in described.notes] == ["a", "b"]
    assert "'FOO' is not in the catalogue" in described.notes[1]


def test_a_machine_that_joins_again_has_its_name_in_the_plan() -> None:
    """After a restart, its node id is new, but not its host name."""
    old, other = row("ip-7", node="x", CPU=2), row("ip-8", node="y", CPU=2)
    known = {old["NodeID"]: "h800-0", other["NodeID"]: "h800-1"}
    rows = [{**old, "Alive": False}, other, row("ip-7", node="z", CPU=2), row("ip-9", node="w", CPU=2)]
    assert [m.name for m in machines(rows, known=known)] == ["h800-0", "h800-1", "ip-9"]
    twice = [*rows, row("ip-7", node="v", CPU=2)]  # two machines of this host name: neither is known to be the one
    assert not any(m.name == "h800-0" for m in machines(twice, known=known))
    moved = {**known, rows[3]["NodeID"]: "h800-0"}  # the name was assigned to another machine meanwhile
    assert [m.name for m in machines(rows, known=moved)] == ["h800-0", "h800-1", "ip-7"]


def test_machines_of_one_name_are_told_apart_and_keep_the_name_they_were_given() -> None:
    rows = [row("vm", node="x", CPU=2), row("vm", node="y", CPU=2), row("other", CPU=1)]
    found = machines(rows)
    assert len({m.name for m in found}) == 3
    assert [m.name for m in found if m.name.startswith("vm-")] == [f"vm-{r['NodeID'][:8]}" for r in rows[:2]]
    kept = machines([*rows, row("h100-0", CPU=1)], known={rows[0]["NodeID"]: "h100-0"})
    assert sorted(m.name for m in kept)[0] == "h100-0"
    assert len({m.name for m in kept}) == 4
    assert not machines([{**rows[0], "Alive": False}])


def test_machines_without_a_gpu_count_only_where_nobody_has_one_or_it_is_asked_for() -> None:
    mixed = machines([row("head", CPU=4), row("gpu", GPU=2, CPU=8, accelerator_type__L4=1)])
    described = describe(mixed, name="x")
    assert [node.name for node in described.settings.nodes] == ["gpu"]
    assert "head is not used: it has no GPU" in described.notes[0]
    assert len(describe(mixed, name="x", with_cpus=True).settings.nodes) == 2
    assert [n.gpus for n in describe(machines([row("head", CPU=4)]), name="x").settings.nodes] == [4]


def test_the_file_is_one_that_the_planner_reads(tmp_path: Path) -> None:
    found = machines([row("a", GPU=2, accelerator_type__L4=1), row("b", GPU=1, accelerator_type__H100=1)])
    described = describe(found, name="mine")
    assert any("inter_node_gb_per_s = 1.25 is an assumption" in note for note in described.notes)
    (tmp_path / "cluster.toml").write_text(as_toml(described))
    cluster = read_cluster(tmp_path / "cluster.toml")
    assert [(node.name, node.gpu.name, node.num_gpus) for node in cluster.nodes] == [("a", "L4", 2), ("b", "H100", 1)]


def test_links_prices_and_types_of_a_file_hold_for_the_machines_that_are_there() -> None:
    base = ClusterSettings.model_validate(
        tomllib.loads(
            """name = "old"
            [links]
            inter_node_gb_per_s = 5
            [[links.between]]
            ends = ["a", "gone"]
            gb_per_s = 25
            [[nodes]]
            gpu = "FOO"
            gpus = 2
            name = "a"
            price_per_gpu_hour = 7
            [[nodes]]
            gpu = "FOO"
            name = "gone"
            [gpu.FOO]
            bf16_tflops = 1
            hbm_gb_per_s = 1
            hbm_gb = 1
            link_gb_per_s = 1
            price_per_hour = 3
            """
        )
    )
    found = machines([row("a", CPU=1, gpu_type_FOO=2), row("new", CPU=1, gpu_type_FOO=4)], types=base.gpu)
    cluster = describe(found, name="now", base=base).settings.build()
    assert [(n.name, n.num_gpus, n.price_per_gpu_h) for n in cluster.nodes] == [("a", 2, 7.0), ("new", 4, 3.0)]
    assert cluster.bytes_per_s[0][1] == 5e9


def test_the_settings_of_a_group_hold_for_each_of_its_machines() -> None:
    group = {"gpu": "H100", "gpus": 2, "count": 2, "name": "h", "link_gb_per_s": 50, "price_per_gpu_hour": 2}
    base = ClusterSettings.model_validate({"name": "b", "links": {"inter_node_gb_per_s": 5}, "nodes": [group]})
    found = machines([row(name, CPU=1, gpu_type_H100=2) for name in ("h-0", "h-1", "other")])
    cluster = describe(found, name="now", base=base).settings.build()
    assert [n.price_per_gpu_h == 2 for n in cluster.nodes] == [True, True, False]
    assert [n.link_bytes_per_s == 50e9 for n in cluster.nodes] == [True, True, False]


def test_machines_that_do_not_fit_to_a_file_are_one_error_of_the_user() -> None:
    links = {"between": [{"ends": ["a", "b"], "gb_per_s": 25}]}
    nodes = [{"gpu": "H100", "gpus": 2, "name": name} for name in "ab"]
    base = ClusterSettings.model_validate({"name": "b", "links": links, "nodes": nodes})
    found = machines([row(name, CPU=1, gpu_type_H100=2) for name in "abc"])
    with pytest.raises(UserError, match="the machines of the cluster: "):
        describe(found, name="now", base=base)

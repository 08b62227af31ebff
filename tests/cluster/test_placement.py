"""From a plan and the machines there are to posts: everything once, nothing beyond what a machine has."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import mixed, plan_of, replica, scoring, stage
from ray_rows import row

from baton.cluster.inventory import machines
from baton.cluster.placement import change, check_engines, match, place, servers_of, without
from baton.errors import UserError
from baton.rollout.engine import EngineSettings
from baton.rollout.engines.sglang.wire import ServerInfo

THREE = machines([row("a", CPU=2, gpu_type_H100=2), row("b", CPU=2, gpu_type_L20=2), row("c", CPU=2, gpu_type_L20=2)])
PLAN = plan_of(
    [stage("H100", "a:0", "a:1")],
    [replica("L20", "b:0", share=0.5, batch=32), replica("L20", "c:0", "c:1", share=0.5, batch=16, tp=2)],
)


def test_a_rank_per_gpu_and_a_worker_per_replica_with_resources_of_their_type() -> None:
    placed = place(PLAN, THREE)
    assert [(p.name, p.machine, p.resources) for p in placed.ranks] == [
        ("rank-0", "a", {"gpu_type_H100": 1.0, "CPU": 1.0}),
        ("rank-1", "a", {"gpu_type_H100": 1.0, "CPU": 1.0}),
    ]
    one, two = placed.workers
    assert (one.name, one.machine, one.slots, one.resources) == ("worker-0", "b", 32, {"gpu_type_L20": 1, "CPU": 1})
    assert (two.name, two.machine, two.slots, two.resources) == ("worker-1", "c", 16, {"gpu_type_L20": 2, "CPU": 1})
    # equal shares on 32 and 16 slots: a slot of the second is to do twice as much; the mean is 1
    assert (one.weight, two.weight) == pytest.approx((2 / 3, 4 / 3))
    assert placed.training_machines == {"a"}


def test_the_reward_model_has_a_process_on_each_of_its_gpus_and_one_on_a_machine_of_cores() -> None:
    plan = plan_of(PLAN.training.stages, PLAN.replicas[:1], reward=scoring("L20", "b:1", "c:0"))
    placed = place(plan, THREE)
    assert [(p.name, p.machine, p.gpu_ids, p.resources) for p in placed.rewards] == [
        ("reward-0", "b", ("b:1",), {"gpu_type_L20": 1, "CPU": 1}),
        ("reward-1", "c", ("c:0",), {"gpu_type_L20": 1, "CPU": 1}),
    ]
    left = without(plan, frozenset({"c"}))
    assert left is not None
    assert left.reward == scoring("L20", "b:1")
    assert without(plan_of(PLAN.training.stages, PLAN.replicas[:1], reward=scoring("L20", "c:0")), {"c"}) is None  # type: ignore[arg-type]
    cores = machines([row("x", CPU=4), row("y", CPU=4)])
    plan = plan_of([stage("CPU", "x:0")], [replica("CPU", "x:1", share=1.0)], reward=scoring("CPU", "y:0", "y:1"))
    assert [(p.name, p.threads, p.resources) for p in place(plan, cores).rewards] == [("reward-0", 2, {"CPU": 2})]
    with pytest.raises(UserError, match="used twice"):
        place(plan_of(PLAN.training.stages, PLAN.replicas, reward=scoring("L20", "b:0")), THREE)


def test_cores_of_a_machine_are_threads_of_one_process() -> None:
    cores = machines([row("x", CPU=4), row("y", CPU=4)])
    plan = plan_of([stage("CPU", "x:0", "x:1", "y:0")], [replica("CPU", "y:1", "y:2", share=1.0, tp=2)])
    placed = place(plan, cores, here=cores[1].id)
    assert [(p.machine, p.threads, p.resources) for p in placed.ranks] == [("y", 1, {"CPU": 1}), ("x", 2, {"CPU": 2})]
    assert [(p.machine, p.threads) for p in placed.workers] == [("y", 2)]
    assert "trainer.speeds=[0.6667, 1.3333]" in placed.overrides, "rows in proportion to the cores of a rank"
    plan = plan_of([stage("CPU", "x:0", "x:1", "y:0"), stage("CPU", "x:2", "y:1", "y:2")], [])
    assert "trainer.speeds=[0.6667, 0.6667]" not in place(plan, cores).overrides, "each rank is slow in one stage"
    even = plan_of([stage("CPU", "x:0", "y:0")], [replica("CPU", "y:1", share=1.0)])
    assert not any("speeds" in each for each in place(even, cores).overrides)


def test_a_colocated_worker_requests_only_the_gpus_without_rank_and_names_the_rank_of_each() -> None:
    two = machines([row("a", CPU=3, gpu_type_H100=3), row("b", CPU=2, gpu_type_L20=2)])
    stages = [stage("H100", "a:1", "a:0")]
    replicas = [replica("H100", "a:0", "a:2", share=0.5, tp=2), replica("H100", "a:1", share=0.5)]
    replicas.append(replica("L20", "b:0", share=0.5))
    placed = place(plan_of(stages, replicas, is_colocated=True), two)
    assert [spec.ranks for spec in placed.workers] == [(1, -1), (0,), ()]
    assert [spec.resources.get("gpu_type_H100") for spec in placed.workers] == [1.0, None, None]
    assert placed.workers[1].resources == {}, "it runs in the bundle of its rank"
    assert 'rollout.placement="colocated"' in placed.overrides
    with pytest.raises(UserError, match="is used twice"):
        place(plan_of(stages, [replica("H100", "a:0", share=0.5)] * 2, is_colocated=True), two)


def test_machines_are_found_by_name_and_else_by_type() -> None:
    renamed = machines(
        [row("c", CPU=1, gpu_type_L20=4), row("p", CPU=1, gpu_type_H100=8), row("q", CPU=1, gpu_type_L20=2)]
    )
    names = {
        machine.name: called
        for machine in renamed
        for node, called in match(PLAN, renamed).items()
        if node == machine.id
    }
    assert names == {"c": "c", "p": "a", "q": "b"}
    swapped = machines([row("a", CPU=1, gpu_type_L20=2), row("b", CPU=1, gpu_type_L20=2), row("z", gpu_type_H100=2)])
    called = match(PLAN, swapped)
    assert len(set(called.values())) == 3
    assert called[swapped[2].id] == "a"


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (plan_of([stage("H100", "a:0", "a:1", "a:2")], []), "needs a machine a with 3 H100"),
        (plan_of([stage("H200", "a:0")], []), "needs a machine a with 1 H200"),
        (plan_of([stage("H100", "a:0")], [], trainer="idealised"), "idealised trainer"),
        (plan_of([stage("L20", "b:0"), stage("H100", "a:0", "a:1")], []), "different numbers of ranks"),
        (plan_of([stage("L20", "b:0", "b:1", tp=2), stage("H100", "a:0", "a:1", tp=2)], []), "tensor parallelism"),
        (plan_of([stage("CPU", "x:0"), stage("H100", "a:0")], []), "on GPUs and CPUs together"),
        *(
            (plan_of([stage("H100", "a:0")], [replica("L20", *ids, share=1.0)]), f"replica 0 uses {ids[0]}, .* {why}")
            for ids, why in [
                (("b:0", "c:0"), "Ray's resource GPU"),
                (("b:0", "b:1", "c:0"), "same number of consecutive GPUs"),
                (("b:0", "c:0", "b:1", "c:1"), "same number of consecutive GPUs"),
            ]
        ),
        (plan_of([stage("H100", "a:0")], [replica("H100", "a:0", share=1.0)]), "is used twice"),
        (plan_of([stage("H100", "a0")], []), "'a0'; allowed is MACHINE:INDEX"),
    ],
)
def test_what_does_not_fit_is_one_sentence(plan: object, words: str) -> None:
    with pytest.raises(UserError, match=words):
        place(plan, THREE)  # type: ignore[arg-type]


def test_the_ranks_of_a_stage_are_consecutive_and_its_layers_and_widths_are_keys_of_the_recipe() -> None:
    """A stage on one GPU type after a stage on another. Rank 0 is on the controller's machine, and ranks with the same
    index in their stages stay so."""
    stages = [stage("L20", "b:0", "c:1", layers=(0, 3)), stage("H100", "a:1", "a:0", layers=(3, 8))]
    placed = place(plan_of(stages, []), THREE, here=next(m.id for m in THREE if m.name == "c"))
    assert [spec.gpu_ids for spec in placed.ranks] == [("c:1",), ("b:0",), ("a:0",), ("a:1",)]
    assert [spec.name for spec in placed.ranks] == ["rank-0", "rank-1", "rank-2", "rank-3"]
    assert placed.overrides == ("trainer.ranks=4", "trainer.stages=[3, 5]", "trainer.tensor_parallel=1")
    copies = plan_of([stage("L20", "b:0", "b:1", "c:0", "c:1")], [])
    copies = msgspec.structs.replace(copies, training=msgspec.structs.replace(copies.training, shard_size=2))
    assert "trainer.shard_size=2" in place(copies, THREE).overrides
    wide = place(plan_of([stage("L20", "b:0", "b:1", "c:0", "c:1", tp=2)], []), THREE)
    assert wide.overrides == ("trainer.ranks=4", "trainer.stages=1", "trainer.tensor_parallel=2")
    assert [spec.gpu_ids for spec in wide.ranks] == [("b:0",), ("b:1",), ("c:0",), ("c:1",)]


def test_a_group_over_two_types_is_one_stage_whose_speeds_follow_its_ranks() -> None:
    """Rank 0 is on the controller's machine, also here; with copies, the ranks of a machine stay together."""
    parts = [stage("L20", "b:0", "b:1", layers=(0, 8)), stage("H100", "a:0", "a:1", layers=(0, 8))]
    parts[0] = msgspec.structs.replace(parts[0], speed=0.25)
    plan = mixed(plan_of(parts, []))
    placed = place(plan, THREE, here=next(m.id for m in THREE if m.name == "a"))
    assert [spec.gpu_ids for spec in placed.ranks] == [("a:0",), ("a:1",), ("b:0",), ("b:1",)]
    speeds = "trainer.speeds=[1.6, 1.6, 0.4, 0.4]"
    assert placed.overrides == ("trainer.ranks=4", "trainer.stages=1", "trainer.tensor_parallel=1", speeds)
    copies = msgspec.structs.replace(plan, training=msgspec.structs.replace(plan.training, shard_size=2))
    assert place(copies, THREE).overrides[-2:] == ("trainer.shard_size=2", "trainer.speeds=[0.4, 0.4, 1.6, 1.6]")
    even = mixed(plan_of([msgspec.structs.replace(part, speed=1.0) for part in parts], []))
    assert place(even, THREE).overrides == placed.overrides[:-1], "microbatches cannot be smaller: equal shares"


def test_engines_that_cannot_execute_the_replicas_are_refused_in_a_sentence() -> None:
    workers = place(PLAN, THREE).workers
    two = place(
        plan_of([stage("H100", "a:0")], [replica("L20", "b:0", share=0.5), replica("L20", "b:1", share=0.5)]), THREE
    )
    check_engines(EngineSettings(kind="vllm"), workers)
    with pytest.raises(UserError, match=r'a replica has several GPUs, but engine\.kind = "embedded" uses one'):
        check_engines(EngineSettings(kind="embedded"), workers)
    for url in (None, "http://10.0.0.1:30000"):
        with pytest.raises(UserError, match=rf"engine\.sglang\.url: got {url}, but with --ray each worker"):
            check_engines(EngineSettings(kind="sglang", sglang={"url": url}), workers)
    local = EngineSettings(kind="sglang", sglang={"url": "http://127.0.0.1:30000"})
    check_engines(local, workers)
    with pytest.raises(UserError, match="machine b has 2 replicas, but all its workers would use one SGLang server"):
        check_engines(local, two.workers)


def test_a_replica_on_several_machines_has_a_process_on_each_if_all_its_engines_are_vllms_with_direct_weights() -> None:
    gpus = machines([row(name, CPU=4, gpu_type_L20=2, GPU=2) for name in "abc"])
    ids = ("c:0", "c:1", "b:1", "b:0")
    plan = plan_of([stage("L20", "a:0")], [replica("L20", *ids, share=1.0, tp=2)])
    (spec,) = workers = place(plan, gpus).workers
    own = {"gpu_type_L20": 2, "GPU": 2, "CPU": 1}
    assert (spec.machine, spec.gpu_ids, spec.resources, spec.tp, spec.pp) == ("c", ids, own, 2, 2)
    assert [(each.machine, each.gpu_ids, each.resources) for each in spec.further] == [("b", ids[2:], own)]
    assert spec.words.startswith("worker-0 on c and b: 4 L20s")
    check_engines(EngineSettings(kind="vllm"), workers, "direct")
    check_engines(EngineSettings(kind="vllm"), workers, "sparse")
    for kind, transport in (("vllm", "store"), ("embedded", "store"), ("sglang", "store")):
        with pytest.raises(UserError, match=f'uses the machines c and b, but .* is "{transport}"'):
            check_engines(EngineSettings(kind=kind), workers, transport)
    assert without(plan, frozenset({"b"})) is None, "a replica without one of its machines cannot continue"
    cores = machines([row(name, CPU=2) for name in "abc"])
    (spec,) = place(plan_of([stage("CPU", "a:0")], [replica("CPU", "b:0", "c:0", share=1.0)]), cores).workers
    assert (spec.threads, spec.further[0].threads) == (1, 1)
    for shape, why in [
        (replica("CPU", *ids, share=1.0), "one core on each machine"),
        (msgspec.structs.replace(replica("CPU", "b:0", "c:0", share=1.0), pp=1), "tp × pp GPUs, which is 1"),
    ]:
        with pytest.raises(UserError, match=why):
            place(plan_of([stage("CPU", "a:0")], [shape]), cores)


def test_each_replica_of_the_plan_has_an_sglang_server_of_its_shape() -> None:
    one, two = "http://10.0.0.1:30000", "http://10.0.0.1:30001"

    def found(*infos: ServerInfo | str, urls: tuple[str, ...] = (one, two), url: str | None = None) -> object:
        engine = EngineSettings(kind="sglang", sglang={"urls": urls, "url": url})  # type: ignore[arg-type]
        check_engines(engine, place(PLAN, THREE).workers)
        try:
            return servers_of(engine, PLAN, infos)
        except UserError as error:
            return str(error)

    expected = {("b:0",): one, ("c:0", "c:1"): two}
    assert found(ServerInfo(tp=1, pp=1), ServerInfo(tp=2)) == expected
    assert found(ServerInfo(), ServerInfo()) == expected, "servers that do not report their shape"
    said = str(found(ServerInfo(tp=1, pp=2), "HTTP 404"))
    assert (
        f"{one} has tp 1, pp 2, but the plan's replica on b:0 has tp 1, pp 1; {two} does not answer (HTTP 404)" in said
    )
    assert f"{two} has tp 1, pp unknown, but" in str(found(ServerInfo(), ServerInfo(tp=1)))
    assert "got 1 servers, but the plan has 2 replicas" in str(found(ServerInfo(), urls=(one,)))
    assert "got 1 servers, but the plan has 2 replicas" in str(found(ServerInfo(), ServerInfo(), urls=(one, one)))
    assert "remove one of the keys" in str(found(ServerInfo(), ServerInfo(), url=one))


def test_stages_on_cores_have_one_rank_for_each_machine_and_equally_many_of_them() -> None:
    cores = machines([row("x", CPU=4), row("y", CPU=4)])
    even = place(plan_of([stage("CPU", "x:0", "x:1"), stage("CPU", "y:0", "y:1")], []), cores)
    assert [(spec.machine, spec.threads) for spec in even.ranks] == [("x", 2), ("y", 2)]
    with pytest.raises(UserError, match="stages have 1, 2 ranks"):
        place(plan_of([stage("CPU", "x:0", "x:1"), stage("CPU", "x:2", "y:0")], []), cores)


@st.composite
def worlds(draw: st.DrawFn) -> tuple[object, tuple[object, ...]]:
    """Machines of three types, and a plan that gives each GPU at most one job."""
    rows, free = [], {}
    for index in range(draw(st.integers(1, 5))):
        gpu, num, cpus = draw(st.sampled_from(["H100", "L20", "CPU"])), draw(st.integers(1, 4)), draw(st.integers(0, 5))
        amounts = {"CPU": num} if gpu == "CPU" else {"CPU": cpus, f"gpu_type_{gpu}": num}
        rows.append(row(f"m{index}", **amounts))
        free[f"m{index}"] = (gpu, [f"m{index}:{i}" for i in range(num)])
    trained = draw(st.sampled_from(sorted(free)))
    gpu, ids = free[trained]
    cut = draw(st.integers(1, len(ids)))
    stages, left = [stage(gpu, *ids[:cut])], {**free, trained: (gpu, ids[cut:])}
    replicas = []
    for kind, names in left.values():
        while names and draw(st.booleans()):
            size = draw(st.integers(1, len(names)))
            replicas.append(
                replica(kind, *names[:size], share=draw(st.floats(0.01, 1)), batch=draw(st.integers(1, 64)), tp=size)
            )
            names = names[size:]
    return plan_of(stages, replicas), machines(rows)


@given(worlds())
def test_no_machine_is_asked_for_more_than_it_has(world: tuple[object, tuple[object, ...]]) -> None:
    plan, there = world
    placed = place(plan, there)  # type: ignore[arg-type]
    posts = [*placed.ranks, *placed.workers]
    assert len({post.name for post in posts}) == len(posts)
    ids = {name: node for node, name in placed.names.items()}
    asked: dict[str, Counter[str]] = {}
    for post in posts:
        asked.setdefault(ids[post.machine], Counter()).update(post.resources)
    for machine in there:
        has = dict.fromkeys(machine.units, float(machine.num_gpus))  # type: ignore[attr-defined]
        has["CPU"] = max(has.get("CPU", 0.0), machine.cpus)  # type: ignore[attr-defined]
        for resource, amount in asked.get(machine.id, {}).items():  # type: ignore[attr-defined]
            assert amount <= has[resource] + 1e-9
    gpus = [gpu for post in posts for gpu in post.gpu_ids]
    assert sorted(gpus) == sorted({*plan.training.gpu_ids, *(g for r in plan.replicas for g in r.gpu_ids)})  # type: ignore[attr-defined]
    for worker in placed.workers:
        assert EngineSettings(slots=worker.slots).slots <= max(8, *(replica.batch for replica in plan.replicas))  # type: ignore[attr-defined]
    if placed.workers:
        assert sum(p.weight for p in placed.workers) / len(placed.workers) == pytest.approx(1, abs=2e-3)


@given(worlds(), worlds())
def test_a_change_of_plan_keeps_what_is_the_same_and_ends_or_begins_the_rest(one: object, two: object) -> None:
    now, wanted = (place(*world).workers for world in (one, two))  # type: ignore[misc]
    made = change(now, wanted)
    assert {p.name for p in made.kept} | {p.name for p in made.ended} == {p.name for p in now}
    assert not {p.name for p in made.kept} & {p.name for p in made.ended}
    assert sorted(p.gpu_ids for p in (*made.kept, *made.begun)) == sorted(p.gpu_ids for p in wanted)
    same = change(now, now)
    assert (same.kept, same.ended, same.begun) == (now, (), ())


def test_without_a_machine_the_other_replicas_share_the_work() -> None:
    left = without(PLAN, frozenset({"b"}))
    assert left is not None
    assert [(r.gpu_ids, r.share) for r in left.replicas] == [(("c:0", "c:1"), 1.0)]
    assert without(PLAN, frozenset({"b", "c"})) is None
    assert without(PLAN, frozenset({"a"})) is None

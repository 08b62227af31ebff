"""[rollout]: what cannot go together is refused with what to change; defaults follow the mode."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from pydantic import ValidationError

from baton.errors import UserError
from baton.recipe.load import load_recipe
from baton.recipe.recipe import Recipe
from baton.rollout.engine import EngineSettings
from baton.rollout.engines.factory import check_source, chosen
from baton.rollout.settings import RolloutSettings

RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart.toml"

REFUSED = [
    (
        ["rollout.overprovision=0.5", "rollout.mode=partial"],
        'rollout.overprovision: got 0.5, allowed is "auto" or a number',
    ),
    (["rollout.overprovision=2.0"], 'only mode = "partial" uses it; use mode = "partial"'),
    (["rollout.mode=async", "rollout.overprovision=2.0"], "in async, use max_staleness"),
    (["rollout.mode=async", "rollout.on_new_version=drain"], "got 'drain', but mode = \"async\" allows resume or keep"),
    (["rollout.mode=partial", "rollout.on_new_version=drain"], 'mode = "partial" allows resume or keep'),
    (["rollout.max_staleness=2"], 'max_staleness: got 2, but mode = "sync" allows only 0'),
    (["rollout.mode=async", "rollout.max_staleness=-1"], "rollout.max_staleness: got -1"),
    (["rollout.consume=stalest"], 'mode = "sync" always consumes groups in the order of submission'),
    (["rollout.mode=async", "rollout.stale=wait"], "rollout.stale: got 'wait', input should be 'mask' or 'drop'"),
    (
        ["rollout.mode=partial", "rollout.overprovision=4.0", "rollout.max_staleness=2", "rollout.stale=drop"],
        "at most max_staleness + 1 = 3 is allowed",
    ),
    (
        ["algorithm=reinforce_pp", "rollout.group_size=1", "rollout.dynamic_sampling=true"],
        "dynamic_sampling: got true with group_size = 1, but it compares the rewards of a group; use group_size = 2",
    ),
    (["rollout.mode=async"], "engine.processes: got 0"),
    (
        ["engine.kind=vllm", "engine.vllm.replicas=2"],
        'got 2 with weights.transport = "store", but several engines in one run load versions directly',
    ),
    (
        ["engine.kind=vllm", "engine.vllm.replicas=2", "weights.transport=direct", "swarm.workers=1"],
        "weights.transport: got a direct transfer, but engines in workers",
    ),
    (
        ["engine.kind=vllm", "engine.vllm.replicas=2", "weights.transport=direct", "engine.vllm.lora_rank=8"],
        "got 2 with engine.vllm.lora_rank, which was never tested",
    ),
    (
        ["engine.kind=vllm", "engine.vllm.replicas=2", "weights.transport=direct", "rollout.placement=colocated"],
        'got 2 with rollout.placement = "colocated", which was never tested',
    ),
    (["rollout.group_size=1"], "use 2 or more"),
    (["engine.report_every_tokens=0"], "engine.report_every_tokens: got 0"),
    (["rollout.mode=fast"], "rollout.mode: got 'fast'"),
    (["rollout.max_staleness=4"], 'rollout.max_staleness: got 4, but mode = "sync" allows only 0'),
    (["rollout.overprovsion=2.0"], "did you mean 'overprovision'?"),
    (["rollout.top_k=513"], "rollout.top_k: got 513"),
    (["rollout.top_p=0.0"], "rollout.top_p: got 0.0"),
    (
        ["rollout.top_p=0.9", "engine.report_every_tokens=600", "engine.processes=0", "swarm.workers=1"],
        "engine.report_every_tokens: got 600, but with up to 512 kept tokens per sampled token (rollout.top_p, top_k), "
        "a report of the swarm has room for 512 sampled tokens",
    ),
]


@pytest.mark.parametrize(("overrides", "sentence"), REFUSED, ids=[" ".join(o) for o, _ in REFUSED])
def test_impossible_combinations_are_refused_with_one_sentence(overrides, sentence):
    if "engine.processes: got 0" in sentence or "engine.kind=vllm" in overrides:
        overrides = [*overrides, "engine.processes=0"]
    with pytest.raises(UserError) as refused:
        load_recipe(Recipe, RECIPE, overrides)
    assert sentence in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("keys", "expected"),
    [({}, (1.0, 0, False)), ({"top_p": 0.9}, (0.9, 512, True)), ({"top_p": 0.9, "top_k": 20}, (0.9, 20, True)),
     ({"top_k": 7}, (1.0, 7, True))],
)  # fmt: skip
def test_truncated_sampling_is_bounded_and_reports_its_masks(keys, expected):
    found = RolloutSettings(**keys).sampling()
    assert (found.top_p, found.top_k, found.reports_kept) == expected
    assert found.max_kept == (expected[1] if expected[2] else 0)


def test_defaults_follow_the_mode():
    sync, partial, free = (
        RolloutSettings().rules(),
        RolloutSettings(mode="partial").rules(),
        RolloutSettings(mode="async").rules(),
    )
    assert (sync.max_staleness, sync.consume, sync.on_new_version) == (0, "submission", "drain")
    assert (partial.max_staleness, partial.consume, partial.overprovision) == (4, "completion", 2.0)
    assert (free.max_staleness, free.consume, free.on_new_version) == (4, "stalest", "resume")
    assert RolloutSettings(mode="partial", max_concurrency=64).rules().overprovision == math.inf
    assert RolloutSettings(mode="partial", overprovision=1.5, batch_groups=5).rules().max_outstanding(1.5) == 7
    auto = RolloutSettings(mode="partial", overprovision="auto", stale="drop", max_staleness=0).rules()
    assert (auto.overprovision, auto.most_overprovision) == (1.0, 1.0), "what is carried must not get too old"


def test_an_empty_stop_string_which_would_end_every_response_at_once_is_refused() -> None:
    with pytest.raises(ValidationError, match="non-empty strings"):
        RolloutSettings(stop=("\n", ""))


@pytest.mark.parametrize("url", ["http://[::1", "http://127.0.0.1:99999", "http://localhost:port"])
def test_a_url_without_a_possible_address_is_refused_before_the_run_waits_for_its_server(url: str) -> None:
    for key in ({"url": url}, {"urls": ["http://127.0.0.1:30000", url]}):
        with pytest.raises(ValidationError, match=r"Invalid IPv6 URL|Port"):
            EngineSettings(kind="sglang", sglang=key)


def test_a_hub_may_send_its_worker_to_a_server_of_the_workers_own_machine_alone() -> None:
    def named(url: str) -> EngineSettings:
        return chosen(EngineSettings(), kind="sglang", options=[f"url={url}"])

    for url in ("http://127.0.0.1:30000", "http://localhost:30000", "http://[::1]:30000"):
        check_source(named(url), own=[])
    for url in ("http://10.0.0.5:30000", "http://127.0.0.1.example.org", "http://localhost@example.org"):
        check_source(named(url), own=["url"])
        with pytest.raises(UserError, match="only to a server on its own machine"):
            check_source(named(url), own=[])


@pytest.mark.parametrize("key", ["weights_directory", "key_variable"])
def test_a_hub_chooses_neither_where_a_worker_writes_nor_which_secret_it_sends(key: str) -> None:
    options = ["url=http://127.0.0.1:30000", f"{key}=SOMETHING"]
    given = chosen(EngineSettings(), kind="sglang", options=options)
    with pytest.raises(UserError, match=rf"engine\.sglang\.{key}: got SOMETHING from the hub"):
        check_source(given, own=["url"])
    check_source(given, own=["url", key])
    check_source(given.model_copy(update={"kind": "embedded"}), own=[])  # another kind of engine does not read them

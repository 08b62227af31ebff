"""vLLM's sampling masks and its silence, through a fake of the fields that the client reads: what vLLM 0.32's source
says, no more."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from baton.clock import Clock
from baton.errors import EngineFault, UserError
from baton.recipe.recipe import Recipe
from baton.rollout.engine import EngineSettings
from baton.rollout.engines.vllm.client import VllmClient
from baton.rollout.engines.vllm.engine import VllmEngine
from baton.rollout.engines.whole_weights import WholeWeights
from baton.rollout.settings import RolloutSettings
from baton.types import Lease, PolicyVersion, SamplingParams, Segment, Trajectory
from baton.weights.direct.settings import DirectTransfer

TRUNCATED = RolloutSettings(max_new_tokens=4, top_p=0.9, top_k=7).sampling()


@dataclass
class FakeLlm:
    """AsyncLLM, as far as the client calls it. It generates ids 10, 11, …, two at a time, with masks of two ids."""

    asked: list[Any]
    masks: Any = lambda token: [token - 5, token]
    is_silent: bool = False
    experts: Any = None
    """Experts of all tokens, in the last message."""
    errored = False
    output_handler = None

    async def generate(self, prompt: Any, params: Any, key: str, lora_request: Any) -> AsyncIterator[Any]:
        self.asked.append(params)
        if self.is_silent:
            await asyncio.Event().wait()
        for begin in range(10, 10 + params.max_tokens, 2):
            ids = [begin, begin + 1][: 10 + params.max_tokens - begin]
            masks = None if self.masks is None else SimpleNamespace(token_ids=[self.masks(i) for i in ids])
            logprobs = [{i: SimpleNamespace(logprob=-0.5)} for i in ids]
            is_last = begin + 2 >= 10 + params.max_tokens
            one = SimpleNamespace(
                token_ids=ids, logprobs=logprobs, finish_reason="length" if is_last else None, sampling_mask=masks
            )
            if is_last:
                one.routed_experts = self.experts
            yield SimpleNamespace(outputs=[one], num_cached_tokens=0)

    async def abort(self, key: str) -> None: ...

    async def collective_rpc(self, name: str, args: Any) -> None: ...

    async def pause_generation(self, mode: str, clear_cache: bool) -> None: ...

    async def resume_generation(self) -> None: ...

    async def update_weight_version(self, label: str) -> None: ...

    def shutdown(self, timeout_s: float) -> None: ...


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> FakeLlm:
    fake = FakeLlm([])
    modules = {
        "vllm": {"SamplingParams": lambda **keys: SimpleNamespace(**keys), "AsyncEngineArgs": SimpleNamespace},
        "vllm.inputs": {"tokens_input": lambda ids, cache_salt: ids},
        "vllm.sampling_params": {"RequestOutputKind": SimpleNamespace(DELTA="delta")},
        "vllm.v1": {},
        "vllm.v1.engine": {},
        "vllm.v1.engine.async_llm": {"AsyncLLM": SimpleNamespace(from_engine_args=lambda arguments: fake)},
    }
    for name, attributes in modules.items():
        module = ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
    return fake


@pytest.fixture
def make(llm: FakeLlm) -> Iterator[Callable[..., VllmEngine]]:
    made: list[VllmEngine] = []

    def build(*, return_sampling_mask: bool = True, clock: Clock = time.monotonic) -> VllmEngine:
        keys = {"return_sampling_mask": return_sampling_mask}
        settings = EngineSettings(kind="vllm", slots=8, max_context_tokens=32, vllm=keys)
        config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=64))
        model = SimpleNamespace(config=config, state_dict=lambda keep_vars: {})
        skeleton: Any = SimpleNamespace(model=model, end_ids=(1,), text=str)
        client = VllmClient({}, answer_timeout_s=30.0)
        made.append(VllmEngine(client, skeleton, None, settings, PolicyVersion("r", 0), clock))
        return made[-1]

    yield build
    for engine in made:
        engine.close()


@pytest.fixture
def engine(make: Callable[..., VllmEngine]) -> VllmEngine:
    return make()


def lease(sampling: SamplingParams) -> Lease:
    return Lease(0, Trajectory(0, 0, (2, 3)), sampling, 5, 0)


def segments(engine: VllmEngine) -> list[Segment]:
    found: list[Segment] = []
    for _ in range(600):  # each step waits up to 50 ms for a token
        for report in engine.step():
            found += report.segments  # type: ignore[union-attr]
            if report.finish_reason is not None:  # type: ignore[union-attr]
                return found
    raise AssertionError("the fake has not answered")


def test_masks_come_with_their_tokens_and_top_p_and_top_k_are_asked_for(engine: VllmEngine, llm: FakeLlm) -> None:
    engine.submit(lease(TRUNCATED))
    whole = Trajectory(0, 0, (2, 3)).extended(tuple(segments(engine)))
    assert whole.token_ids == [10, 11, 12, 13]
    assert [np.frombuffer(mask, "<u2").tolist() for mask in whole.kept] == [[5, 10], [6, 11], [7, 12], [8, 13]]
    assert [(asked.top_p, asked.top_k, asked.temperature) for asked in llm.asked] == [(0.9, 7, 1.0)]


@pytest.mark.parametrize("masks", [None, lambda token: [token - 1]])
def test_a_token_without_its_mask_is_an_error(engine: VllmEngine, llm: FakeLlm, masks: Any) -> None:
    llm.masks = masks
    engine.submit(lease(TRUNCATED))
    with pytest.raises(
        EngineFault, match=r"trajectory 0/0: vLLM reported [02] sampling masks for 2 tokens, or a mask without"
    ):
        segments(engine)


def test_an_engine_with_masks_refuses_all_else_and_one_without_refuses_truncation(
    engine: VllmEngine, make: Callable[..., VllmEngine]
) -> None:
    for other in (SamplingParams(4), SamplingParams(4, temperature=0.0), SamplingParams(4, top_k=7)):
        with pytest.raises(UserError, match="accepts only rollouts with top_p or top_k; evaluate with another engine"):
            engine.submit(lease(other))
    with pytest.raises(
        UserError, match=r"only temperature is allowed, or, for training, engine\.vllm\.return_sampling"
    ):
        make(return_sampling_mask=False).submit(lease(TRUNCATED))


def test_a_silent_vllm_is_an_error_once_its_requests_have_waited_for_the_timeout(
    make: Callable[..., VllmEngine], llm: FakeLlm
) -> None:
    now_s, llm.is_silent = [0.0], True
    engine = make(clock=lambda: now_s[0])
    timeout_s = EngineSettings(kind="vllm").vllm.answer_timeout_s
    now_s[0] = 2 * timeout_s
    assert engine.step() == [], "without a request there is nothing to wait for"
    engine.submit(lease(TRUNCATED))
    assert engine.step() == [], "the wait begins with the request"
    now_s[0] += timeout_s
    assert engine.step() == []
    now_s[0] += 1.0
    with pytest.raises(EngineFault, match=r"generated no token for \d+ s, with 1 trajectories running"):
        engine.step()


def test_vllm_may_be_silent_while_it_is_paused_for_a_load(make: Callable[..., VllmEngine], llm: FakeLlm) -> None:
    """A load that fails leaves the engine paused until the next version, however long that takes."""
    now_s, llm.is_silent = [0.0], True
    engine = make(clock=lambda: now_s[0])
    long_s = 2 * EngineSettings(kind="vllm").vllm.answer_timeout_s
    engine.submit(lease(TRUNCATED))
    assert engine.step() == []
    for number in (1, 2):  # of the first load, only the begin is seen
        now_s[0] += long_s
        label = engine.begin_load(PolicyVersion("r", number))
        now_s[0] += long_s
        assert engine.step() == []
    engine.end_load(PolicyVersion("r", 2), label)
    assert [report.is_aborted for report in engine.step()] == [True], "the lease was for the old version"  # type: ignore[union-attr]
    engine.submit(msgspec.structs.replace(lease(TRUNCATED), version=2))
    assert engine.step() == []
    now_s[0] += long_s
    with pytest.raises(EngineFault, match="generated no token"):
        engine.step()


def test_a_version_that_was_converted_for_all_replicas_is_not_converted_again(
    make: Callable[..., VllmEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The names in a file may differ from those in the model, so a second conversion would not find the tensors."""
    monkeypatch.setattr(WholeWeights, "whole", lambda self, tensors: {f"file.{name}": t for name, t in tensors.items()})
    monkeypatch.setattr(VllmClient, "detect_stops", lambda self: None)
    sender = SimpleNamespace(join=lambda *_: None, leave=lambda *_: None)
    versions: Any = SimpleNamespace(sender=sender, prepare=None)
    engine, loaded = make(), list[Any]()
    engine.use_direct(DirectTransfer("gloo", versions=versions))
    assert engine.direct is not None
    monkeypatch.setattr(engine.direct, "load", lambda tensors, version: loaded.append(tensors))
    engine.load_weights(versions.prepare({"a": 1}), PolicyVersion("r", 1))
    assert loaded == [{"file.a": 1}]


def test_a_call_that_ends_just_after_a_wait_for_it_has_succeeded(
    make: Callable[..., VllmEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, threadsafe = make(), asyncio.run_coroutine_threadsafe

    class Late(Future[Any]):
        """Gets its result between the end of the first wait and the next look at it."""

        def __init__(self, inner: Future[Any]) -> None:
            super().__init__()
            self.inner = inner

        def result(self, timeout: float | None = None) -> Any:
            if not self.done():
                self.set_result(self.inner.result(30.0))
                raise TimeoutError
            return super().result(timeout)

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", lambda work, loop: Late(threadsafe(work, loop)))
    engine.client.pause()
    engine.client.resume()


def test_a_recipe_must_ask_vllm_for_masks_and_sglang_is_refused() -> None:
    tree: dict[str, Any] = {
        "run": {"name": "r"},
        "model": {"path": "m"},
        "task": [{"name": "chain_sum"}],
        "rollout": {"top_p": 0.95},
        "engine": {"kind": "vllm"},
    }
    with pytest.raises(ValueError, match=r"set engine\.vllm\.return_sampling_mask = true; .*set eval\.enabled = false"):
        Recipe.model_validate(tree)
    tree["engine"]["vllm"] = {"return_sampling_mask": True}
    with pytest.raises(ValueError, match=r"eval\.enabled = false"):
        Recipe.model_validate(tree)
    tree["eval"] = {"enabled": False}
    assert Recipe.model_validate(tree).rollout.sampling().top_k == 512
    tree["engine"] = {"kind": "sglang", "sglang": {"url": "http://127.0.0.1:1"}}
    with pytest.raises((ValueError, UserError), match="whose server does not report the kept tokens"):
        Recipe.model_validate(tree)

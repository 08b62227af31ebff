"""Dishonest workers at a real hub: found out, put into quarantine, and without a trace in what is trained."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from baton.console import Console
from baton.errors import TrainingDiverged, UserError
from baton.policy.new_model import scratch_model, scratch_tokenizer
from baton.policy.settings import ScratchSettings
from baton.policy.tokenizer import Tokenizer
from baton.recipe.recipe import Recipe
from baton.records.run_directory import RunDirectory
from baton.rollout.engines.embedded.engine import EmbeddedEngine, skeleton_engine
from baton.run.assemble import build_loop
from baton.swarm.auth import AccessGrant, Role, TokenFile
from baton.swarm.messages import Welcome
from baton.swarm.verification.quarantine import Quarantine
from baton.swarm.worker.worker import SwarmWorker, WorkerOptions
from baton.trainer.checkpoint import list_checkpoints
from baton.types import FailureCause, FinishReason, FromWorker, Lease, PolicyVersion, Report
from baton.views.terminal.progress import TerminalObserver

pytestmark = pytest.mark.timing

STEPS = 4


@cache
def small_tokenizer() -> Tokenizer:
    return scratch_tokenizer(["1+2-3 <think>1+2=3</think><answer>0</answer>"], 300)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny"
    tokenizer = small_tokenizer()
    settings = ScratchSettings(vocab_size=300, hidden_size=32, num_layers=2, num_heads=2, intermediate_size=64)
    scratch_model(settings, tokenizer, seed=0).save_pretrained(path)
    tokenizer.hf.save_pretrained(path)
    return path


def recipe(model: Path, directory: Path) -> Recipe:
    directory.mkdir(exist_ok=True)
    return Recipe.model_validate(
        {
            "run": {"name": "r", "directory": str(directory), "steps": STEPS, "threads": 1, "seed": 3},
            "model": {"path": str(model), "device": "cpu"},
            "task": [{"name": "chain_sum", "form": "compact", "params": {"max_terms": 3, "max_digits": 1}}],
            "answer": {"format": "last_line", "instruct": False},
            "reward": [{"kind": "function", "function": "tests.run.test_resume:evenness", "isolate": False}],
            "rollout": {"batch_groups": 4, "group_size": 4, "max_new_tokens": 12, "stall_timeout_s": 60},
            "engine": {"slots": 16, "max_context_tokens": 64},
            "trainer": {"lr": 1e-3},
            "eval": {"every": 0, "num_prompts": 4},
            "swarm": {"serve": "127.0.0.1:0", "token_file": str(directory / "tokens.json")},
        }
    )


class Honest(EmbeddedEngine):
    """What it is."""


class OtherWeights(EmbeddedEngine):
    def load_weights(self, tensors: Mapping[str, Any], version: PolicyVersion) -> None:
        noise = torch.Generator().manual_seed(1)
        spoilt = {n: t + 0.02 * torch.randn(t.shape, generator=noise) for n, t in tensors.items()}
        super().load_weights(spoilt, version)


class _Forging(EmbeddedEngine):
    """Changes each report on its way out."""

    def forged(self, report: Report) -> Report:
        raise NotImplementedError

    def step(self) -> list[FromWorker]:
        return [self.forged(one) if isinstance(one, Report) and one.segments else one for one in super().step()]


class FlatteredLogprobs(_Forging):
    def forged(self, report: Report) -> Report:
        last = report.segments[-1]
        flattered = msgspec.structs.replace(last, behavior_logprobs=tuple(x / 2 for x in last.behavior_logprobs))
        return msgspec.structs.replace(report, segments=(*report.segments[:-1], flattered))


class CutShort(_Forging):
    """Says that it has come to the end of a response after two tokens, to be through with it."""

    def forged(self, report: Report) -> Report:
        last, end = report.segments[-1], small_tokenizer().hf.eos_token_id
        short = msgspec.structs.replace(
            last, token_ids=(*last.token_ids[:1], end), behavior_logprobs=(*last.behavior_logprobs[:1], -0.5)
        )
        return msgspec.structs.replace(report, segments=(short,), finish_reason=FinishReason.STOP)


class OtherNoise(EmbeddedEngine):
    """Draws as it likes: the first step towards choosing the best of several."""

    def submit(self, lease: Lease) -> None:
        super().submit(msgspec.structs.replace(lease, noise_seed=lease.noise_seed + 1))


class WordsOfAnother(_Forging):
    """Hands in the same words for everybody."""

    _first: Report | None = None

    def forged(self, report: Report) -> Report:
        self._first = self._first or report
        return msgspec.structs.replace(self._first, lease_id=report.lease_id)


def train(
    wanted: Recipe, kinds: Mapping[str, type[EmbeddedEngine]], *, trusted: bool = False, resume: bool = False
) -> dict[str, torch.Tensor]:
    """Train over a hub, with a worker of each kind under a token of its name; return the last weights."""
    from safetensors.torch import load_file

    tokens = TokenFile(Path(wanted.swarm.token_file))
    texts = {name: tokens.create(Role.WORKER, 3600, name, trusted) for name in kinds}
    with TerminalObserver(Console(quiet=True), STEPS) as observer:
        loop = build_loop(wanted, observer, resume=resume, overwrite=False)
        url = f"http://127.0.0.1:{loop.port.hub.port}"  # type: ignore[attr-defined]
        with working({texts[name]: kind for name, kind in kinds.items()}, url):
            try:
                loop.train()
            finally:
                loop.close()
    last = list_checkpoints(RunDirectory.open(wanted.run.path).checkpoints)[-1]
    return load_file(last / "model.safetensors")


@contextmanager
def working(kinds: Mapping[str, type[EmbeddedEngine]], url: str) -> Iterator[None]:
    """Workers in threads, by their tokens; ended at the end."""
    threads, stops = [], []
    for token, kind in kinds.items():
        worker = SwarmWorker(WorkerOptions(url, token, device="test", say=lambda text: None), maker(kind))
        loop = asyncio.new_event_loop()
        stops.append(lambda loop=loop, worker=worker: loop.call_soon_threadsafe(worker.leave))

        def run(loop: asyncio.AbstractEventLoop = loop, worker: SwarmWorker = worker) -> None:
            with suppress(UserError, asyncio.CancelledError):  # in quarantine, or the run has failed
                loop.run_until_complete(worker.run())

        threads.append(threading.Thread(target=run, daemon=True))
        threads[-1].start()
    try:
        yield
    finally:
        for stop in stops:
            stop()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive(), "a worker does not end"


def maker(kind: type[EmbeddedEngine]) -> Callable[[Welcome, Path, Any], EmbeddedEngine]:
    def make(welcome: Welcome, directory: Path, base: Any) -> EmbeddedEngine:
        engine = skeleton_engine(directory, base, welcome.engine_settings(), device="cpu", attention=welcome.attention)
        engine.__class__ = kind
        return engine

    return make


@pytest.fixture(scope="module")
def honest(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    wanted = recipe(model, tmp_path_factory.mktemp("honest"))
    weights = train(wanted, {"one": Honest, "two": Honest})
    assert not Quarantine(wanted.run.path / "quarantine.jsonl").records, "nobody is accused without a reason"
    return weights


@pytest.mark.numerics
@pytest.mark.parametrize("kind", [OtherWeights, FlatteredLogprobs, CutShort, OtherNoise, WordsOfAnother])
def test_a_dishonest_worker_is_found_out_and_leaves_no_trace(
    model: Path, tmp_path: Path, honest: dict[str, torch.Tensor], kind: type[EmbeddedEngine]
) -> None:
    wanted = recipe(model, tmp_path)
    weights = train(wanted, {"good": Honest, "bad": kind})
    quarantine_records = Quarantine(wanted.run.path / "quarantine.jsonl").records
    assert [quarantine_record.label.partition("#")[0] for quarantine_record in quarantine_records] == ["bad"]
    assert quarantine_records[0].verdict.reason
    assert not quarantine_records[0].trained, "what it wrote was held back until it was judged"
    assert all(torch.equal(weights[name], honest[name]) for name in honest), "as if it had never been there"


class Unconfirmed(_Forging):
    """Reports logprobs far below those of its weights, in some answers to each prompt."""

    def submit(self, lease: Lease) -> None:
        self.forged_leases = getattr(self, "forged_leases", set())
        if lease.trajectory.sample_index in (1, 2):
            self.forged_leases.add(lease.lease_id)
        super().submit(lease)

    def forged(self, report: Report) -> Report:
        if report.lease_id not in self.forged_leases:
            return report
        segments = tuple(
            msgspec.structs.replace(one, behavior_logprobs=tuple(x - 30.0 for x in one.behavior_logprobs))
            for one in report.segments
        )
        return msgspec.structs.replace(report, segments=segments)


def unchecked(model: Path, directory: Path) -> Recipe:
    wanted = recipe(model, directory)
    return wanted.model_copy(update={"inspection": wanted.inspection.model_copy(update={"share": 0.0, "first": 0})})


def test_logprobs_that_only_the_trainer_disproves_end_the_worker_and_not_the_run(model: Path, tmp_path: Path) -> None:
    """No trajectory is checked by the hub, so they reach the trainer."""
    wanted = unchecked(model, tmp_path)
    train(wanted, {"good": Honest, "bad": Unconfirmed})
    (record,) = Quarantine(wanted.run.path / "quarantine.jsonl").records
    assert record.label.partition("#")[0] == "bad"
    assert "trainer.max_logprob_diff" in record.verdict.reason
    assert not record.num_checked
    assert not record.trained or max(step for _, step in record.trained) < STEPS
    run = RunDirectory.open(wanted.run.path)
    members = [m for step in range(1, STEPS + 1) for group in run.groups(step) for m in group.members]
    forged = [m for m in members if min(m.trajectory.behavior_logprobs) < -20.0]
    assert len(members) == STEPS * 16, "no batch became smaller"
    assert forged
    assert {m.judgement.cause for m in forged} == {FailureCause.QUARANTINED}
    excluded = {m.trajectory.name for m in members if m.judgement.cause is FailureCause.QUARANTINED}
    assert excluded <= {name.partition("@")[0] for name in record.requeue}, "only what the worker wrote"


def test_a_batch_of_which_no_reward_is_left_ends_the_run_with_the_way_back(model: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainingDiverged, match=r"engine and trainer compute different .* --resume --skip-batch \d"):
        train(unchecked(model, tmp_path), {"bad": Unconfirmed})


def test_a_run_that_ends_before_it_has_recorded_the_exclusion_excludes_them_again(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The resumed run trains the recorded batch, whose authors it does not know."""
    wanted = unchecked(model, tmp_path)

    def killed(*arguments: Any) -> None:
        raise RuntimeError("killed")

    with monkeypatch.context() as ended:
        ended.setattr("baton.run.loop.RunBatches.replaced", killed)
        with pytest.raises(RuntimeError, match="killed"):
            train(wanted, {"good": Honest, "bad": Unconfirmed})
    train(wanted, {"other": Honest}, resume=True)
    (record,) = Quarantine(wanted.run.path / "quarantine.jsonl").records
    assert record.label.partition("#")[0] == "bad"
    run = RunDirectory.open(wanted.run.path)
    members = [m for step in range(1, STEPS + 1) for group in run.groups(step) for m in group.members]
    forged = [m for m in members if min(m.trajectory.behavior_logprobs) < -20.0]
    assert forged
    assert {m.judgement.cause for m in forged} == {FailureCause.QUARANTINED}


def test_logprobs_of_a_trusted_worker_that_the_trainer_cannot_confirm_end_the_run(model: Path, tmp_path: Path) -> None:
    wanted = unchecked(model, tmp_path)
    with pytest.raises(TrainingDiverged, match=r"because of trajectory .*: engine and trainer compute different"):
        train(wanted, {"good": Honest, "bad": Unconfirmed}, trusted=True)
    assert not Quarantine(wanted.run.path / "quarantine.jsonl").records


def test_a_worker_in_quarantine_is_not_let_in_again(model: Path, tmp_path: Path) -> None:
    wanted = recipe(model, tmp_path)
    train(wanted, {"good": Honest, "bad": OtherNoise})
    again = wanted.model_copy(update={"run": wanted.run.model_copy(update={"steps": STEPS + 2})})
    with TerminalObserver(Console(quiet=True), STEPS) as observer:
        loop = build_loop(again, observer, resume=True, overwrite=False)
        hub = loop.port.hub  # type: ignore[attr-defined]
        grants = {
            t.name: AccessGrant(t.name, t.role, False, t.digest)
            for t in TokenFile(Path(wanted.swarm.token_file)).tokens()
        }
        (quarantine_record,) = Quarantine(wanted.run.path / "quarantine.jsonl").records
        reason = hub.access.quarantine.reason(grants["bad"], quarantine_record.worker)
        loop.close()
    assert reason is not None
    assert reason.startswith("in quarantine")
    assert quarantine_record.token == grants["bad"].digest
    assert hub.access.quarantine.reason(grants["bad"], "another worker") is None
    assert hub.access.quarantine.reason(grants["good"], "") is None


def test_the_secret_of_a_run_outlives_its_hub_and_is_nobody_elses_to_read(model: Path, tmp_path: Path) -> None:
    """It decides which trajectories are checked, and by it workers are known again."""
    wanted, secrets, keys = recipe(model, tmp_path), [], []
    TokenFile(Path(wanted.swarm.token_file)).create(Role.WORKER, 3600)
    for resume in (False, True):
        with TerminalObserver(Console(quiet=True), STEPS) as observer:
            loop = build_loop(wanted, observer, resume=resume, overwrite=False)
            path = wanted.run.path / "inspection.secret"
            secrets.append(path.read_bytes())
            assert path.stat().st_mode & 0o777 == 0o600
            keys.append(loop.port.hub.access.keys)  # type: ignore[attr-defined]
            loop.close()
    assert secrets[0] == secrets[1]
    assert len(secrets[0]) == 32
    key = keys[0].issue("token")
    assert keys[1].worker("token", key) == keys[0].worker("token", key) is not None


@pytest.mark.slow
def test_a_stranger_whose_token_is_named_like_the_runs_own_takes_nobody_with_it(model: Path, tmp_path: Path) -> None:
    wanted = recipe(model, tmp_path)
    wanted = wanted.model_copy(update={"swarm": wanted.swarm.model_copy(update={"workers": 1})})
    train(wanted, {"local-0": CutShort})
    (quarantine_record,) = Quarantine(wanted.run.path / "quarantine.jsonl").records
    (stranger,) = TokenFile(Path(wanted.swarm.token_file)).tokens()
    assert quarantine_record.token == stranger.digest


@pytest.mark.parametrize("own", [False, True])
def test_the_runs_own_workers_are_checked_only_where_the_recipe_asks(model: Path, tmp_path: Path, own: bool) -> None:
    """The checks are on, since others may join, and a token that the run made for its own workers is used."""
    wanted = recipe(model, tmp_path)
    wanted = wanted.model_copy(
        update={
            "run": wanted.run.model_copy(update={"steps": 1}),
            "inspection": wanted.inspection.model_copy(update={"own": own}),
        }
    )
    TokenFile(Path(wanted.swarm.token_file)).create(Role.WORKER, 3600)
    with TerminalObserver(Console(quiet=True), 1) as observer:
        loop = build_loop(wanted, observer, resume=False, overwrite=False)
        hub = loop.port.hub  # type: ignore[attr-defined]
        scratch = [Path(line) for line in (wanted.run.path / "scratch.txt").read_text().splitlines()]
        (token,) = [path.read_text() for directory in scratch for path in directory.glob("local-0")]
        with working({token: Honest}, f"http://127.0.0.1:{hub.port}"):
            loop.train()
            loop.close()
    assert (hub.members.verifier.num_checked.total() > 0) is own

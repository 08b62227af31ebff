"""Direct transfers into a real vLLM on a CPU, over gloo: proves the protocol, and nothing about GPUs."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from engine_contract import PROMPT
from test_vllm_death import vllms
from test_vllm_exact import assert_logprobs_are_those_of
from test_vllm_runs import EAGER, assert_trained_on_its_own_tokens, baton, end, read_metrics, written

sys.path.insert(0, str(Path(__file__).parents[1] / "weights" / "direct"))

from replica_process import STAGES, ProcessLink, await_cause
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from baton.policy.settings import ModelSettings
from baton.policy.tensors import policy_tensors
from baton.rollout.engine import EngineSettings
from baton.types import PolicyVersion
from baton.weights.direct.protocol import DirectRules
from baton.weights.direct.settings import DirectTransfer
from baton.weights.direct.stream import OutgoingVersion
from tests.model_families import tiny_config

DEADLINE_S = 120.0
RULES = DirectRules(connect_s=10, announce_s=5, stall_s=5, commit_s=5, first_wait_s=0.1, longest_wait_s=1.0)
SETTINGS = {"slots": 8, "max_context_tokens": 1024}
WHOLE, SPARSE = DirectTransfer("gloo"), DirectTransfer("gloo", is_sparse=True)


class StagedLink:
    """The link of a vLLM whose worker gets a signal just before a call; `update_weights`: before the second bucket."""

    def __init__(self, link, worker: int) -> None:
        self.link, self.worker, self.world_size = link, worker, link.world_size
        self.hit: tuple[str, int] | None = None

    def call(self, method, info, timeout_s):
        if self.hit is not None and self.hit[0] == method and (method != "update_weights" or info["bucket"]["index"]):
            number, self.hit = self.hit[1], None
            os.kill(self.worker, number)
        self.link.call(method, info, timeout_s)


class Started:
    """A vLLM with a sender of its own, which a second replica, a plain process, shares."""

    def __init__(self, path: str, other: ProcessLink, direct: DirectTransfer = WHOLE) -> None:
        from baton.rollout.engines.factory import engine_of_model
        from baton.rollout.engines.whole_weights import Skeleton, WholeWeights
        from baton.weights.direct.gloo import GlooTransport
        from baton.weights.direct.sender import DirectSender

        before = vllms(os.getpid())
        settings = EngineSettings(kind="vllm", vllm={**EAGER, "answer_timeout_s": 60}, **SETTINGS)
        self.whole = WholeWeights(Skeleton(Path(path), settings).model, None).whole
        self.engine = engine_of_model(
            ModelSettings(path=path, device="cpu"), settings, PolicyVersion("run", 0), direct=direct
        )
        own = {pid: name for pid, name in vllms(os.getpid()).items() if pid not in before}
        self.worker = next(pid for pid, name in own.items() if name.startswith("VLLM::Worker"))
        self.engine.direct.close()
        self.sender = DirectSender(
            GlooTransport("127.0.0.1").connect,
            time.monotonic,
            RULES,
            is_sparse=direct.is_sparse,
            bucket_bytes=20_000,
        )
        self.engine.direct.may_start.set()  # the tests pause the engine themselves
        self.link, self.other = StagedLink(self.engine.direct, self.worker), other
        self.sender.join("vllm", self.link)
        self.sender.join("other", other)
        self.number = 0

    def offer(self, tensors) -> PolicyVersion:
        self.number += 1
        version = PolicyVersion("run", self.number)
        self.sender.offer(self.whole(tensors), version)
        return version

    def close(self) -> None:
        self.sender.close()
        self.engine.close()


@pytest.fixture(scope="module")
def other():
    link = ProcessLink()
    yield link
    link.close()


@pytest.fixture(scope="module")
def direct(vllm_paths, other):
    made = Started(vllm_paths["qwen3"], other)
    yield made
    made.close()


def test_a_load_by_the_engine_itself_gives_the_other_model(vllm_paths, load, driver):
    from baton.rollout.engines.factory import engine_of_model

    settings = EngineSettings(kind="vllm", vllm={**EAGER, "answer_timeout_s": 60}, **SETTINGS)
    engine = engine_of_model(
        ModelSettings(path=vllm_paths["qwen3"], device="cpu"), settings, PolicyVersion("run", 0), direct=WHOLE
    )
    try:
        for number, name in ((1, "qwen3_next"), (2, "qwen3")):
            engine.load_weights(policy_tensors(load(name)), PolicyVersion("run", number))
            lease = driver.lease(number, PROMPT, 16, version=number, temperature=0.0)
            grown = driver.run(engine, [lease])[number]
            assert grown.policy_versions == [number] * 16
            assert_logprobs_are_those_of(load(name), PROMPT, grown)
    finally:
        engine.close()


def generated(direct: Started, load, driver, name: str) -> None:
    """Serve what was loaded, and compare with the model."""
    direct.engine.client.resume()
    lease = driver.lease(1000 + direct.number, PROMPT, 8, version=0, temperature=0.0)
    assert_logprobs_are_those_of(load(name), PROMPT, driver.run(direct.engine, [lease])[lease.lease_id])
    direct.engine.client.pause()


@pytest.mark.parametrize("stage", STAGES)
def test_a_stopped_worker_at_any_stage_delays_no_other_and_goes_on_with_a_whole_version(stage, direct, load, driver):
    """In the middle of the stream the worker has one part of a fused layer: a load that goes on there is wrong."""
    direct.engine.client.pause()
    first, second = policy_tensors(load("qwen3")), policy_tensors(load("qwen3_next"))
    direct.sender.wait("vllm", direct.offer(first), DEADLINE_S)
    generated(direct, load, driver, "qwen3")
    if stage == STAGES[0]:
        direct.sender.leave("vllm")
        direct.link.hit = (stage, signal.SIGSTOP)
        direct.sender.join("vllm", direct.link)
    else:
        direct.link.hit = (stage, signal.SIGSTOP)
    version = direct.offer(second)
    try:
        direct.sender.wait("other", version, RULES.connect_s)
        await_cause(direct.sender, "vllm", "no answer|failed")
        assert direct.sender.served("vllm") is None
    finally:
        os.kill(direct.worker, signal.SIGCONT)
    direct.sender.wait("vllm", version, DEADLINE_S)
    assert direct.link.hit is None
    generated(direct, load, driver, "qwen3_next")


@pytest.mark.parametrize("stage", STAGES)
def test_a_killed_worker_at_any_stage_delays_no_other(stage, vllm_paths, other, load):
    one = Started(vllm_paths["qwen3"], other)
    try:
        tensors = policy_tensors(load("qwen3_next"))
        one.engine.client.pause()
        if stage == STAGES[0]:
            one.sender.leave("vllm")
            one.link.hit = (stage, signal.SIGKILL)
            one.sender.join("vllm", one.link)
        else:
            one.sender.wait("vllm", one.offer(policy_tensors(load("qwen3"))), DEADLINE_S)
            one.link.hit = (stage, signal.SIGKILL)
        version = one.offer(tensors)
        one.sender.wait("other", version, RULES.connect_s)
        served = other.ask("served", None, 10.0)
        assert all(torch.equal(torch.tensor(served[n]), t) for n, t in one.whole(tensors).items())
        with pytest.raises(Exception, match="the core of the vLLM engine has exited"):
            one.sender.wait("vllm", version, DEADLINE_S, check=one.engine.client.check)
        assert one.sender.served("vllm") is None
    finally:
        one.close()


# ---- differences -----------------------------------------------------------------------------------------------------


def weights_of(worker) -> dict[str, bytes]:
    """The bits of all parameters of vLLM's model. Runs in vLLM's worker."""
    model = worker.model_runner.get_model()
    return {name: bytes(p.detach().contiguous().view(torch.uint8).numpy()) for name, p in model.named_parameters()}


def nudged(tensors, share: float, seed: int = 0):
    """A copy of tensors in which a share of the elements has other bits."""
    torch.manual_seed(seed)
    made = {name: tensor.clone() for name, tensor in tensors.items()}
    for tensor in made.values():
        changes = torch.rand(tensor.shape) < share
        tensor[changes] *= 1.25
    return made


def num_bytes(tensors) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


@pytest.fixture(scope="module")
def sparse(vllm_paths, other):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # to call `weights_of` in the worker
        made = Started(vllm_paths["qwen3"], other, SPARSE)
        yield made
        made.close()


def bits(sparse: Started) -> dict[str, bytes]:
    (found,) = sparse.engine.client.call_workers(weights_of, None, DEADLINE_S)
    return found


def bits_of_whole(sparse: Started, tensors) -> dict[str, bytes]:
    """The bits after a new communicator, over which a replica gets a whole version."""
    sparse.sender.leave("vllm")
    sparse.sender.join("vllm", sparse.link)
    before = sparse.sender.sent_bytes
    sparse.sender.wait("vllm", sparse.offer(tensors), DEADLINE_S)
    assert sparse.sender.sent_bytes - before >= num_bytes(tensors)
    return bits(sparse)


def test_five_differences_in_place_give_the_bits_of_the_whole_version(sparse, load, driver):
    """Fused and tied layers included. The served probabilities are those of the last version, too."""
    sparse.engine.client.pause()
    tensors = policy_tensors(load("qwen3"))
    first = bits_of_whole(sparse, tensors)
    for seed in range(5):
        tensors = nudged(tensors, 0.01, seed)
        before = sparse.sender.sent_bytes
        version = sparse.offer(tensors)
        for name in ("vllm", "other"):
            sparse.sender.wait(name, version, DEADLINE_S)
        assert 0 < sparse.sender.sent_bytes - before < 2 * 0.04 * num_bytes(tensors), "two replicas, 2 % each"
    found = bits(sparse)
    sparse.engine.client.resume()
    model = load("qwen3")
    model.load_state_dict(tensors, strict=False)
    lease = driver.lease(1, PROMPT, 16, version=0, temperature=0.0)
    assert_logprobs_are_those_of(model, PROMPT, driver.run(sparse.engine, [lease])[1])
    sparse.engine.client.pause()
    assert found == bits_of_whole(sparse, tensors)
    assert not [name for name in found if found[name] == first[name] and "norm" not in name], "all matrices changed"


@pytest.mark.parametrize("damaged", [1, 2], ids=["indices", "values"])
def test_a_damaged_difference_is_never_served_and_the_whole_version_follows(damaged, sparse, load, monkeypatch):
    from baton.weights.direct.gloo import GlooGroup

    sparse.engine.client.pause()
    sparse.sender.leave("other")
    tensors = policy_tensors(load("qwen3"))
    bits_of_whole(sparse, tensors)
    real, count, before = GlooGroup.broadcast, 0, sparse.sender.sent_bytes

    def broadcast(self, tensor):
        nonlocal count
        count += 1
        real(self, tensor + 1 if count == damaged else tensor)

    monkeypatch.setattr(GlooGroup, "broadcast", broadcast)
    new = nudged(tensors, 0.01)
    sparse.sender.wait("vllm", sparse.offer(new), DEADLINE_S)
    assert sparse.sender.sent_bytes - before >= num_bytes(new)
    found = bits(sparse)
    assert found == bits_of_whole(sparse, new)
    sparse.sender.join("other", sparse.other)


@pytest.mark.parametrize("stage", STAGES[1:])
def test_a_worker_that_is_stopped_in_a_difference_goes_on_with_a_whole_version(stage, sparse, load):
    sparse.engine.client.pause()
    first = policy_tensors(load("qwen3"))
    second = nudged(first, 0.2)
    sparse.sender.wait("vllm", sparse.offer(first), DEADLINE_S)
    sparse.link.hit = (stage, signal.SIGSTOP)
    before = sparse.sender.sent_bytes
    version = sparse.offer(second)
    try:
        sparse.sender.wait("other", version, RULES.connect_s)
        await_cause(sparse.sender, "vllm", "no answer|failed")
        assert sparse.sender.served("vllm") is None
    finally:
        os.kill(sparse.worker, signal.SIGCONT)
    sparse.sender.wait("vllm", version, DEADLINE_S)
    assert sparse.link.hit is None
    assert sparse.sender.sent_bytes - before > num_bytes(second)
    found = bits(sparse)
    assert found == bits_of_whole(sparse, second)


def test_a_loader_that_does_not_skip_unchanged_elements_is_noticed():
    from baton.errors import WeightsFault
    from baton.rollout.engines.vllm.transfer import check_patched

    model = torch.nn.Linear(2, 2)
    check_patched(model)
    model.bias.data[1] = float("nan")
    with pytest.raises(WeightsFault, match="NaN instead of unchanged elements: bias"):
        check_patched(model)


def test_a_model_with_experts_is_refused_before_vllm_starts(vllm_paths, tokenizer, tmp_path):
    from baton.errors import UserError
    from baton.rollout.engines.factory import engine_of_model

    model = AutoModelForCausalLM.from_config(tiny_config("qwen3_moe"))
    model.save_pretrained(tmp_path)
    tokenizer.hf.save_pretrained(tmp_path)
    settings = EngineSettings(kind="vllm", vllm=EAGER, **SETTINGS)
    with pytest.raises(UserError, match=r'weights\.transport: got "sparse", but .* has experts'):
        engine_of_model(ModelSettings(path=str(tmp_path), device="cpu"), settings, PolicyVersion("x", 0), direct=SPARSE)


@pytest.mark.parametrize("lora", [False, True], ids=["all weights", "an adapter"])
@pytest.mark.parametrize("transport", ["direct", "sparse"])
def test_a_run_trains_with_direct_transfers_and_writes_no_weights(transport, lora, tmp_path):
    """In sync every token is of the version that is trained: in float32, the probabilities tell stale weights at once.
    Differences are short only in bfloat16 and at a small learning rate, which the probabilities do not tell apart:
    there, the bytes must be those of changed elements. Other tests compare the bits after differences."""
    changes = {"engine__kind": "vllm", "engine__vllm": EAGER, "weights__transport": transport}
    if transport == "sparse":
        changes |= {"engine__dtype": "bfloat16", "trainer__lr": 1e-6}
    recipe = written(tmp_path, **changes, **({"lora__rank": 4, "lora__alpha": 8} if lora else {}))
    assert f'transport = "{transport}"' in recipe.read_text()
    log = tmp_path / "log"
    end(baton(log, "train", str(recipe)), log)
    assert not list((tmp_path / "r").rglob("weights/*"))
    sent = [row["perf/weights_sent_bytes"] for row in read_metrics(tmp_path / "r") if "policy/loss" in row]
    if transport == "sparse":
        smallest = 2 * min(tensor.numel() for tensor in load_file(tmp_path / "model" / "model.safetensors").values())
        assert min(sent[1:]) > smallest, "without any change, only the smallest tensor is sent"
        assert max(sent[1:]) < sent[0] / 5
    else:
        assert_trained_on_its_own_tokens(tmp_path)
        assert sent[1] == sent[2] > 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_trains_with_two_replicas_that_receive_each_version(ranks, tmp_path):
    """A replica with stale weights would give other probabilities than the trainer's."""
    changes = {"engine__kind": "vllm", "engine__vllm": {**EAGER, "replicas": 2}, "weights__transport": "direct"}
    recipe = written(tmp_path, **changes, trainer__ranks=ranks)
    log = tmp_path / "log"
    end(baton(log, "train", str(recipe)), log)
    assert not list((tmp_path / "r").rglob("weights/*"))
    assert_trained_on_its_own_tokens(tmp_path)
    sent = [row["perf/weights_sent_bytes"] for row in read_metrics(tmp_path / "r") if "policy/loss" in row]
    assert sent[1:] == [2 * num_bytes(load_file(tmp_path / "model" / "model.safetensors"))] * 2


def test_a_run_ends_although_the_core_of_one_replica_is_stopped(tmp_path):
    """Its requests continue on the other replica long before `answer_timeout_s`, because the core is seen to be
    stopped. It is started again."""
    changes = {"engine__kind": "vllm", "weights__transport": "sparse"}
    own = {**EAGER, "replicas": 2, "answer_timeout_s": 3600}
    recipe = written(tmp_path, **changes, engine__vllm=own, trainer__lr=1e-6)
    log = tmp_path / "log"
    run = baton(log, "train", str(recipe), "run.steps=30")
    until_s = time.monotonic() + DEADLINE_S
    try:
        while not (tmp_path / "r").exists() or len(read_metrics(tmp_path / "r")) < 2:
            assert run.poll() is None, log.read_text(errors="replace")[-3000:]
            assert time.monotonic() < until_s, log.read_text(errors="replace")[-3000:]
            time.sleep(0.1)
        victim = max(pid for pid, name in vllms(run.pid).items() if name.startswith("VLLM::EngineCore"))
        os.kill(victim, signal.SIGSTOP)
        end(run, log)
    finally:
        run.kill()
    said = log.read_text(errors="replace")
    assert re.search(rf"replica \d has failed: .*stopped process {victim} of vLLM", said)
    assert_trained_on_its_own_tokens(tmp_path, 30)


@pytest.mark.parametrize("stages", [1, 2])
def test_ranks_send_their_shards_directly(stages, tmp_path):
    """The ranks gather bucket by bucket, and rank 0 sends: no version is written. Stale or misplaced shards would give
    other probabilities than the trainer's."""
    changes = {"engine__kind": "vllm", "engine__vllm": EAGER, "weights__transport": "direct"}
    recipe = written(tmp_path, **changes, trainer__ranks=2, trainer__stages=stages)
    log = tmp_path / "log"
    end(baton(log, "train", str(recipe)), log)
    assert not list((tmp_path / "r").rglob("weights/*"))
    assert_trained_on_its_own_tokens(tmp_path)
    sent = [row["perf/weights_sent_bytes"] for row in read_metrics(tmp_path / "r") if "policy/loss" in row]
    assert sent[1] == sent[2] == num_bytes(load_file(tmp_path / "model" / "model.safetensors"))


def test_what_needs_a_gpu_can_be_built_from_vllms_own_classes():
    """The classes and their arguments, without a transfer: NCCL and CUDA IPC have never run with Baton."""
    from vllm.distributed.weight_transfer import VLLMWeightSyncClient, WeightSource, WeightTransferEngineFactory
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo, IPCWeightTransferEngine
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLWeightTransferEngine

    from baton.rollout.engines.vllm import transfer
    from baton.weights.direct import vllm_transport as direct

    for name, base in (("nccl", NCCLWeightTransferEngine), ("ipc", IPCWeightTransferEngine)):
        with pytest.raises(ValueError, match="already registered"):
            WeightTransferEngineFactory.register_engine(f"baton_{name}", base)
        made = getattr(transfer, name)
        assert issubclass(made, base)
        assert not made.__abstractmethods__
        assert made.update_weights is not base.update_weights
    sent = []

    class Link:
        world_size = 2

        def call(self, method, info, timeout_s):
            sent.append((method, info))

    source = direct.VersionSource()
    version = PolicyVersion("run", 1)
    (source.bucket,) = OutgoingVersion({"a": torch.ones(3), "b": torch.zeros(2, 2)}, version).buckets()
    client = direct.StreamClient(Link(), source, RULES)
    assert isinstance(client, VLLMWeightSyncClient)
    assert [(m.name, m.shape) for m in source.metadata()] == [("a", (3,)), ("b", (2, 2))]
    assert [name for name, _ in source] == ["a", "b"]
    assert WeightSource.__abstractmethods__ <= set(dir(source))
    client.start_weight_update()
    client.update_weights({"names": ["a", "b"]})
    client.finish_weight_update()
    ((method, info),) = sent
    assert (method, info["bucket"]["index"], info["bucket"]["count"]) == ("update_weights", 0, 1)
    assert len(info["bucket"]["checksums"]) == 2
    NCCLTrainerInitInfo("127.0.0.1", 1, 3, rank=0)
    IPCTrainerInitInfo(rank=0)


def test_a_difference_can_be_sent_and_received_by_vllms_sparse_engine():
    """The calls over a communicator that only records them: NCCL itself has never run with Baton."""
    from vllm.distributed.weight_transfer.sparse_nccl_engine import SparseNCCLTrainerWeightTransferEngine

    from baton.rollout.engines.vllm import transfer
    from baton.weights.direct import vllm_transport as direct

    old = {"a": torch.zeros(50), "b": torch.zeros(2, 2)}
    new = {"a": torch.zeros(50), "b": torch.ones(2, 2)}
    new["a"][7] = 2.0
    base = OutgoingVersion(old, PolicyVersion("run", 1))
    buckets = OutgoingVersion(new, PolicyVersion("run", 2), base).buckets(base.version)
    calls, wire = [], []

    class Link:
        world_size = 1

        def call(self, method, info, timeout_s):
            calls.append((method, info))

    class Group:
        device = torch.device("cpu")

        def broadcast(self, tensor, src, stream):
            wire.append(tensor)

    source = direct.VersionSource()
    source.bucket = buckets[0]
    sparse = SparseNCCLTrainerWeightTransferEngine(client=direct.StreamClient(Link(), source, RULES))
    sparse.model_update_group = Group()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "current_stream", lambda *given, **named: None)
        sparse.send_weight_chunk(direct.patches_of(buckets[0]))
    ((method, info),) = calls
    assert (method, info["names"], info["num_updates_list"], info["bucket"]["base"]) == (
        "update_weights",
        ["a"],
        [1],
        "run-1-",
    )
    assert [tensor.tolist() for tensor in wire] == [[7], [2.0]]
    assert buckets[1].info["names"] == ["b"]
    assert transfer.nccl.receive_patches is not transfer.gloo.receive_patches

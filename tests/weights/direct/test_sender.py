"""Direct transfers between real processes over gloo: signals at every stage of a transfer. Gloo on a CPU proves the
protocol, and nothing about GPUs."""

from __future__ import annotations

import signal
import sys
import time
import weakref
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from replica_process import STAGES, ProcessLink, await_cause

from baton.errors import WeightsFault
from baton.types import PolicyVersion
from baton.weights.direct.gloo import GlooGroup, GlooTransport
from baton.weights.direct.protocol import DirectRules
from baton.weights.direct.sender import DirectSender
from tests.all_cases import ALL

RULES = DirectRules(connect_s=8, announce_s=3, stall_s=3, commit_s=3, first_wait_s=0.1, longest_wait_s=0.5)
DEADLINE_S = 60.0
SIGNALS = list(product(STAGES, (signal.SIGKILL, signal.SIGSTOP)))


def version(number: int) -> PolicyVersion:
    return PolicyVersion("run", number)


def tensors(number: int) -> dict[str, torch.Tensor]:
    """Six tensors, two in a bucket, one of them empty."""
    made = {f"w{i}": torch.arange(64, dtype=torch.float32).view(8, 8) + 100 * number + i for i in range(5)}
    return {**made, "empty": torch.zeros(0, 4)}


def plain(number: int) -> dict[str, list[float]]:
    return {name: tensor.tolist() for name, tensor in tensors(number).items()}


@pytest.fixture(scope="module")
def processes():
    """Two replicas that survive all tests, and a place for a third."""
    links = {name: ProcessLink() for name in "ab"}
    yield links
    for link in links.values():
        link.close()


@pytest.fixture
def sender():
    made = DirectSender(GlooTransport("127.0.0.1").connect, time.monotonic, RULES, bucket_bytes=512)
    yield made
    made.close()


def test_every_replica_gets_each_version_whole(processes, sender):
    for name, link in processes.items():
        sender.join(name, link)
    for number in (1, 2):
        sender.offer(tensors(number), version(number))
        for name, link in processes.items():
            sender.wait(name, version(number), DEADLINE_S)
            assert link.ask("served", None, 5.0) == plain(number)
    assert processes["a"].methods.count("init_weight_transfer_engine") == 1, "one communicator for all versions"


@pytest.mark.parametrize("is_sparse", [False, True])
def test_a_closed_sender_keeps_no_version(is_sparse):
    sender = DirectSender(GlooTransport("127.0.0.1").connect, time.monotonic, RULES, is_sparse=is_sparse)
    memory = np.zeros(8, np.float32)
    held = weakref.ref(memory)
    sender.offer({"w": torch.from_numpy(memory)}, version(1))
    del memory
    sender.close()
    assert held() is None, "the version's memory is freed although the sender still exists"


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "number"), SIGNALS)
def test_a_signal_to_one_replica_at_any_stage_does_not_delay_the_others(stage, number, processes, sender):
    """The third replica hits itself exactly there. It serves nothing until it has loaded a whole version."""
    victim = ProcessLink()
    try:
        victim.ask("signal_at", (stage, number), DEADLINE_S)
        for name, link in (("victim", victim), *processes.items()):
            sender.join(name, link)
        sender.offer(tensors(1), version(1))
        begin_s = time.monotonic()
        for name, link in processes.items():
            sender.wait(name, version(1), DEADLINE_S)
            assert link.ask("served", None, 5.0) == plain(1)
        others_s = time.monotonic() - begin_s
        assert sender.served("victim") is None
        if number == signal.SIGSTOP:
            sender.offer(tensors(2), version(2))
            for name in processes:
                sender.wait(name, version(2), DEADLINE_S)
            await_cause(sender, "victim", "no answer|Timed out|timed out")
            assert sender.served("victim") is None
            victim.cont()
            expected = 2
        else:
            victim.process.join(DEADLINE_S)
            victim.close()
            victim = ProcessLink()
            sender.join("victim", victim)
            expected = 1
        sender.wait("victim", version(expected), DEADLINE_S)
        assert victim.ask("served", None, 5.0) == plain(expected)
        assert others_s < DEADLINE_S / 2, "the others waited for the victim's deadlines"
    finally:
        victim.close()


# ---- differences -----------------------------------------------------------------------------------------------------


def changed(number: int) -> dict[str, torch.Tensor]:
    """Version `number`: one element of each of three tensors, and all elements of a fourth, differ from the version
    before it. A difference therefore has a bucket of changed elements and a bucket of a whole tensor."""
    torch.manual_seed(0)
    made = {f"w{i}": torch.randn(40, 40).bfloat16() for i in range(3)} | {"norm": torch.full((8,), float(number))}
    for name in ("w0", "w1", "w2"):
        made[name].view(-1)[torch.arange(number)] = 1.0 + number
    return {**made, "same": torch.ones(50)}


WHOLE_BYTES = sum(tensor.nbytes for tensor in changed(0).values())
CHANGED_BYTES = 8 * 4
"""Bytes of the whole tensor in a difference."""


def held(link: ProcessLink, number: int) -> bool:
    served = link.ask("served", None, 5.0)
    return served == {name: tensor.tolist() for name, tensor in changed(number).items()}


@pytest.fixture
def sparse():
    made = DirectSender(GlooTransport("127.0.0.1").connect, time.monotonic, RULES, is_sparse=True, bucket_bytes=4000)
    yield made
    made.close()


def test_who_has_the_previous_version_gets_the_difference_and_others_the_whole(processes, sparse):
    """Replica `a` follows six versions; `b` misses version 3."""
    for name, link in processes.items():
        sparse.join(name, link)
    sent, expected = [], []
    for number in range(1, 7):
        if number == 3:
            sparse.leave("b")
        elif number == 4:
            sparse.join("b", processes["b"])
        present = "a" if number == 3 else "ab"
        before = sparse.sent_bytes
        sparse.offer(changed(number), version(number))
        for name in present:
            sparse.wait(name, version(number), DEADLINE_S)
            assert held(processes[name], number)
        sparse.withdraw()
        one = CHANGED_BYTES + 3 * number * (4 + 2) if number > 1 else WHOLE_BYTES
        received = {"a": one} if number == 3 else {"a": one, "b": WHOLE_BYTES if number == 4 else one}
        assert {name: processes[name].ask("bytes_of_last", None, 5.0) for name in present} == received
        sent.append(sparse.sent_bytes - before)
        expected.append(sum(received.values()))
    assert sent == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "number"), SIGNALS[2:] if ALL else [(STAGES[2], signal.SIGKILL), (STAGES[3], signal.SIGSTOP)]
)
def test_a_signal_during_a_difference_does_not_delay_the_others(stage, number, processes, sparse):
    """The victim then has parts of two versions. It serves nothing until it has loaded a whole version, and after that
    it receives differences again. CI runs two of the six cases: of whole versions, it runs all."""
    victim = ProcessLink()
    try:
        for name, link in (("victim", victim), *processes.items()):
            sparse.join(name, link)
        sparse.offer(changed(1), version(1))
        for name in ("victim", *processes):
            sparse.wait(name, version(1), DEADLINE_S)
        victim.ask("signal_at", (stage, number), DEADLINE_S)
        sparse.offer(changed(2), version(2))
        for name, link in processes.items():
            sparse.wait(name, version(2), DEADLINE_S / 2)
            assert held(link, 2)
        if number == signal.SIGSTOP:
            await_cause(sparse, "victim", "no answer|Timed out|timed out")
            assert sparse.served("victim") is None
            victim.cont()
        else:
            victim.process.join(DEADLINE_S)
            victim.close()
            victim = ProcessLink()
            sparse.join("victim", victim)
        sparse.wait("victim", version(2), DEADLINE_S)
        assert held(victim, 2)
        assert victim.ask("bytes_of_last", None, 5.0) == WHOLE_BYTES
        sparse.offer(changed(3), version(3))
        sparse.wait("victim", version(3), DEADLINE_S)
        assert held(victim, 3)
        assert victim.ask("bytes_of_last", None, 5.0) < WHOLE_BYTES / 10
    finally:
        victim.close()


@pytest.mark.parametrize("damaged", [1, 2], ids=["indices", "values"])
def test_a_damaged_difference_is_refused_and_the_whole_version_follows(damaged, processes, sparse, monkeypatch):
    sparse.join("a", processes["a"])
    sparse.offer(changed(1), version(1))
    sparse.wait("a", version(1), DEADLINE_S)
    real, count = GlooGroup.broadcast, 0

    def broadcast(self, tensor):
        nonlocal count
        count += 1
        real(self, tensor + 1 if count == damaged else tensor)

    monkeypatch.setattr(GlooGroup, "broadcast", broadcast)
    sparse.offer(changed(2), version(2))
    sparse.wait("a", version(2), DEADLINE_S)
    assert held(processes["a"], 2)
    assert processes["a"].ask("bytes_of_last", None, 5.0) == WHOLE_BYTES


def test_a_damaged_stream_is_never_served_and_the_next_attempt_is(processes, sender, monkeypatch):
    """One byte of the second bucket changes between the checksum and the send."""
    sent = tensors(1)
    sender.join("a", processes["a"])
    sender.offer(sent, version(1))
    sender.wait("a", version(1), DEADLINE_S)
    damaged = tensors(2)
    real, count = GlooGroup.broadcast, 0

    def broadcast(self, tensor):
        nonlocal count
        count += 1
        real(self, tensor + 1 if count == 4 else tensor)

    monkeypatch.setattr(GlooGroup, "broadcast", broadcast)
    sender.offer(damaged, version(2))
    sender.wait("a", version(2), DEADLINE_S)
    assert processes["a"].ask("served", None, 5.0) == plain(2)
    assert count > len(damaged), "the first attempt was refused"
    assert processes["a"].methods.count("start_weight_update") >= 3


def test_a_replica_that_never_answers_is_named_with_its_last_cause(processes):
    class Dead:
        world_size = 1

        def call(self, method, info, timeout_s):
            raise WeightsFault("no route")

    sender = DirectSender(GlooTransport("127.0.0.1").connect, time.monotonic, RULES)
    try:
        sender.join("dead", Dead())
        sender.offer(tensors(1), version(1))
        with pytest.raises(WeightsFault, match=r"dead did not load version 1 directly within 1 s: connect: no route"):
            sender.wait("dead", version(1), 1.0)
    finally:
        sender.close()

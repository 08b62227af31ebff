"""The hub's door: who may do what, what is written down of those who may not, and what the hub shows of itself."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families
from swarm_bench import LINEAGE, MODEL, SwarmBench, hello, quick, version_of, wait_until

from baton.errors import Fault, UserError
from baton.swarm.auth import INVALID_TOKEN, AccessGrant, Role, TokenFile, digest_of
from baton.swarm.hub.access import AccessControl
from baton.swarm.hub.hub import Hub
from baton.swarm.hub.listener import HubListener
from baton.swarm.hub.membership import Membership
from baton.swarm.hub.peers import FORGET_AFTER_S, FrameQueue, RelayList
from baton.swarm.hub.session import HubSession
from baton.swarm.hub.status import HubStatus, prometheus
from baton.swarm.listen import ListenAddress
from baton.swarm.messages import (
    Admitted,
    Heartbeat,
    HeartbeatAck,
    Leaving,
    Malformed,
    Rejected,
    Want,
    decode_from_hub,
    decode_from_worker,
    encode,
)
from baton.swarm.verification.policy import QuarantineRecord
from baton.swarm.verification.quarantine import MAX_QUARANTINED
from baton.swarm.verification.verify import violation
from baton.types import Lease, Report, SamplingParams, Trajectory

pytestmark = pytest.mark.timing

ROUTES = {
    "/worker": {Role.WORKER},
    "/model": {Role.WORKER, Role.RELAY},
    f"/weights/manifest/{LINEAGE}/0": {Role.WORKER, Role.RELAY},
    "/weights/chunk/" + "0" * 64: {Role.WORKER, Role.RELAY},
    "/status": {Role.ADMIN},
    "/metrics": {Role.ADMIN},
}


def get(bench: SwarmBench, path: str, token: str | None = None, **headers: str) -> tuple[int, bytes]:
    """Ask; return status and body."""
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    request = urllib.request.Request(bench.url + path, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[SwarmBench]:
    (tmp_path / "run").mkdir()
    with quick():
        made = SwarmBench(tmp_path, "async", max_staleness=4)
        yield made
        made.close()


def state(bench: SwarmBench) -> Any:
    hub, table = bench.hub, bench.broker.table
    return bench.in_hub(
        lambda: (
            sorted(hub.members.peers),
            sorted(table.workers),
            len(table.tasks),
            hub.members.want,
            dict(hub.members.versions),
            hub.members.slots,
        )
    )


def test_a_token_is_called_invalid_unless_the_hub_cannot_read_its_tokens(bench):
    """A worker that was connected before exits only if its token is called invalid."""
    bench.begin()
    token = bench.tokens.create(Role.WORKER, 3600, name="w")

    def challenge(status: int) -> str | None:
        request = urllib.request.Request(f"{bench.url}/worker", headers={"Authorization": f"Bearer {token}"})
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request, timeout=30)
        assert caught.value.code == status
        return caught.value.headers["WWW-Authenticate"]

    text = bench.tokens.path.read_text()
    bench.tokens.path.write_text("{")
    assert challenge(401) is None
    bench.tokens.path.write_text(text)
    bench.tokens.revoke("w")
    assert challenge(401) == INVALID_TOKEN


def test_every_route_refuses_who_may_not_with_a_line_in_the_audit_and_no_effect(bench):
    bench.begin()
    wait_until(lambda: bench.hub.members.want is not None, "a version")
    tokens = {role: bench.tokens.create(role, 3600, name=f"a-{role}") for role in Role}
    revoked = bench.tokens.create(Role.WORKER, 3600, name="revoked")
    bench.tokens.revoke("revoked")
    past = TokenFile(bench.tokens.path, clock=lambda: time.time() - 7200)
    expired = past.create(Role.ADMIN, 3600, name="expired")
    banned = bench.tokens.create(Role.WORKER, 3600, name="banned")
    verdict = violation("forged logprobs")
    for number in range(MAX_QUARANTINED):
        worker = f"{number}", "0/0@1", verdict, (), (), 0, 1, 1, digest_of(banned), f"banned#{number}"
        bench.in_hub(partial(bench.verifier.quarantine.add, QuarantineRecord(*worker)))
    before, denied = state(bench), 0
    unknown = "baton_worker_" + "A" * 43
    for route, roles in ROUTES.items():
        cases = [(None, 401), (unknown, 401), ("nonsense", 401), (revoked, 401), (expired, 401), (banned, 403)]
        cases += [(tokens[role], 403) for role in Role if role not in roles]
        for token, wanted in cases:
            if token is banned and Role.WORKER not in roles:
                continue
            status, body = get(bench, route, token)
            assert status == wanted, (route, token, body)
            denied += 1
        for role in roles:
            assert get(bench, route, tokens[role])[0] not in {401, 403}, (route, role)
    assert bench.access.denied == denied
    assert state(bench) == before
    lines = [json.loads(line) for line in (bench.directory / "audit.jsonl").read_text().splitlines()]
    lines = [line for line in lines if line["event"] == "denied"]
    assert len(lines) == denied
    assert {line["status"] for line in lines} == {401, 403}
    assert {line["token"] for line in lines if "token" in line} >= {"revoked", "expired", "banned", "a-admin"}
    assert {line["reason"] for line in lines} >= {"no token", "unknown token", "expired token", "revoked token"}
    banned_because = "in quarantine: 3 workers of this token are quarantined; the last: forged logprobs"
    assert banned_because in {line["reason"] for line in lines}
    text = (bench.directory / "audit.jsonl").read_text()
    assert not any(token in text for token in (*tokens.values(), revoked, expired, banned)), "never a token itself"


def test_quarantine_takes_the_worker_by_its_key_and_the_token_with_the_third(bench):
    token = bench.tokens.create(Role.WORKER, 3600, name="guest")

    async def join(key: str = "") -> list[Any]:
        """Say Hello, and return what the hub says until it hangs up, or a Heartbeat is answered."""
        heard: list[Any] = []
        async with aiohttp.ClientSession() as session, asyncio.timeout(60):
            line = await session.ws_connect(f"{bench.url}/worker", headers={"Authorization": f"Bearer {token}"})
            await line.send_bytes(encode(hello(key)))
            while (message := await line.receive()).type is aiohttp.WSMsgType.BINARY:
                heard.append(decode_from_hub(message.data))
                if isinstance(heard[-1], HeartbeatAck):
                    break
            await line.close()
        return [message for message in heard if isinstance(message, Admitted | Rejected)]

    bench.begin()
    digest = digest_of(token)
    for number in range(3):
        (admitted,) = asyncio.run(join())
        worker = bench.access.keys.worker(digest, admitted.key)
        assert asyncio.run(join(admitted.key)) == [], "the same worker"
        verdict = violation("forged logprobs")
        quarantine_record = QuarantineRecord(worker, "0/0@1", verdict, (), (), 0, 1, 1, digest, f"guest#{number}")
        bench.in_hub(lambda quarantine_record=quarantine_record: bench.verifier.quarantine.add(quarantine_record))
        if number < 2:
            assert asyncio.run(join(admitted.key)) == [Rejected("in quarantine: forged logprobs", is_final=True)]
    with pytest.raises(aiohttp.WSServerHandshakeError, match="403"):
        asyncio.run(join())
    bench.in_hub(lambda: bench.verifier.quarantine.lift("guest", 0.0))
    assert isinstance(asyncio.run(join())[0], Admitted)


def test_what_is_handed_out_is_what_was_published(bench):
    bench.begin()
    wait_until(lambda: bench.hub.members.want is not None, "a version")
    assert get(bench, "/model", bench.worker_token) == (200, MODEL)
    status, manifest = get(bench, f"/weights/manifest/{LINEAGE}/0", bench.worker_token)
    assert (status, manifest) == (200, bench.store.manifest(version_of(0)))
    chunk = bench.store.find(LINEAGE, 0).chunks[0]
    assert get(bench, f"/weights/chunk/{chunk.digest}", bench.worker_token) == (
        200, bench.store.chunk(chunk.digest)
    )  # fmt: skip
    assert get(bench, f"/weights/manifest/{LINEAGE}/7", bench.worker_token)[0] == 404
    assert get(bench, "/health") == (200, b"ok"), "for anybody"


def test_a_token_that_is_revoked_ends_its_connected_worker_for_good(bench):
    bench.begin()
    token = bench.tokens.create(Role.WORKER, 3600, name="guest")
    (guest,) = bench.join(1, token=token)
    bench.step()
    bench.tokens.revoke("guest")
    wait_until(lambda: guest.is_over, "the guest's end")
    assert isinstance(guest.error, UserError)
    assert "no longer valid" in str(guest.error)
    bench.join(1)
    bench.step()
    bench.assert_sound()


def test_a_token_file_that_cannot_be_read_for_a_while_ends_no_worker_for_good(bench):
    bench.begin()
    token = bench.tokens.create(Role.WORKER, 3600, name="guest")
    (guest,) = bench.join(1, token=token)
    whole = bench.tokens.path.read_bytes()
    bench.tokens.path.write_bytes(whole[:-20])
    wait_until(lambda: not bench.hub.members.peers, "the guest's removal")
    bench.tokens.path.write_bytes(whole)
    wait_until(lambda: guest.is_ready, "the guest's return")
    assert not guest.is_over
    bench.step()
    bench.assert_sound()


def test_a_caller_that_joins_and_leaves_again_and_again_is_forgotten(bench):
    members, grant = bench.hub.members, AccessGrant("stranger", Role.WORKER, False, "its digest")

    def come_and_go() -> int:
        for _ in range(50):
            members.on_message(members.join(hello(), grant, "198.51.100.7", FrameQueue()), Leaving())
        members.tick(0.0)
        return len(members.authors)

    assert bench.in_hub(come_and_go) == 0


def test_a_worker_that_has_left_is_forgotten_when_its_tokens_were_trained_on(bench):
    first, _ = bench.join(2)
    bench.begin()
    bench.port.consumed(1, bench.step())
    first.leave()
    assert len(bench.in_hub(lambda: dict(bench.hub.members.authors))) == 2

    def is_forgotten() -> bool:
        bench.port.consumed(bench.version + 1, bench.step())
        bench.in_hub(lambda: bench.hub.members.tick(0.0))
        return len(bench.hub.members.authors) == 1

    wait_until(is_forgotten, "the worker to be forgotten")
    bench.assert_sound()


def test_a_worker_that_returns_too_many_leases_is_named_once_and_in_the_status(bench):
    token = bench.tokens.create(Role.WORKER, 3600, name="stranger")
    members, grant = bench.hub.members, AccessGrant("stranger", Role.WORKER, False, digest_of(token))
    bench.begin()
    wait_until(lambda: members.want is not None, "a version")

    def give_back() -> str:
        members.execute(bench.broker.want(Lease(10**6, Trajectory(10**6, 0, (5,)), SamplingParams(4), 1, 0, False)))
        peer = members.join(hello(serves=version_of(0)), grant, "198.51.100.7", FrameQueue())
        for _ in range(40):
            (*_, lease) = bench.broker.table.workers[peer.number].leases or (None,)
            if lease is not None:
                members.on_message(peer, Report(lease, 0, (), is_aborted=True))
            members.on_message(peer, Heartbeat(version_of(0)))
        for _ in range(2):
            members.tick(0.0)
        return peer.name

    name = bench.in_hub(give_back)
    (said,) = [text for text in bench.said if "more leases" in text]
    assert said.startswith(f"worker {name}: its access token's workers ended 34 more leases")
    assert said.endswith("this worker may hold 0 of 4 leases: check or restart it, or revoke its token")
    status = msgspec.json.decode(get(bench, "/status", bench.admin_token)[1], type=HubStatus)
    assert status.notes == (said,)


def test_an_invalid_message_of_a_worker_begins_no_line_in_the_hubs_output(bench):
    members, grant = bench.hub.members, AccessGrant("stranger", Role.WORKER, False, "its digest")

    def fail() -> None:
        for frame in (msgspec.msgpack.encode({"type": "a\nrelay evil joined"}), encode(Fault("E", "b\nrelay"))):
            session = HubSession(members, grant, "198.51.100.7", FrameQueue())
            session.receive(hello())
            try:
                session.receive(decode_from_worker(frame))
            except Malformed as error:
                session.fail(error)

    bench.in_hub(fail)
    assert any(r"a\nrelay evil" in text for text in bench.said)
    assert any(r"E: b\nrelay" in text for text in bench.said)
    assert not any("\n" in text for text in bench.said)


def test_a_worker_for_another_model_is_refused(bench, monkeypatch):
    monkeypatch.setattr("baton.swarm.transfer.model_digest", lambda packed: "0" * 64)
    (worker,) = bench.join(1, is_waited_for=False)
    wait_until(
        lambda: any("do not have the digest that the hub announced" in text for text in worker.said), "the refusal"
    )
    assert bench.port.slots == 0


def test_status_and_metrics_say_how_it_is(bench):
    bench.begin()
    first, _ = bench.join(2)
    for _ in range(3):
        groups = bench.step()
        bench.port.consumed(bench.version, groups)
        bench.port.metrics({"time/train": 2.5})
    versions = [v for group in groups for member in group.members for v in member.trajectory.policy_versions]
    staleness = {str(age): versions.count(2 - age) / len(versions) for age in range(3) if 2 - age in versions}
    first.kill()
    admin = bench.admin_token

    def shown() -> HubStatus:
        return msgspec.json.decode(get(bench, "/status", admin)[1], type=HubStatus)

    wait_until(lambda: len(shown().workers) == 1, "the dead one is forgotten")
    wait_until(lambda: shown().workers[0].version == 3, "the newest is served")
    wait_until(lambda: shown().rule["broadcast_s"] > 0, "a tick has looked at the workers")
    found = shown()
    (worker,) = found.workers
    assert (found.run, found.lineage, found.version, found.step) == ("bench", LINEAGE, 3, 3)
    assert found.staleness == staleness
    assert worker.state == "serving"
    assert worker.name.startswith("workers#")
    assert worker.slots == 8
    assert worker.is_trusted
    assert worker.worker_class == "fake in float32 on cpu"
    assert found.publication["bytes"] > 0
    assert sum(size for route, size in found.bytes_out.items() if route != "total") == found.bytes_out["total"]
    assert found.bytes_out["model"] == 2 * len(MODEL)
    assert "trajectories/s" in found.provisioning
    families = list(text_string_to_metric_families(get(bench, "/metrics", admin)[1].decode()))
    samples = {(one.name, *one.labels.values()): one.value for family in families for one in family.samples}
    assert samples["baton_version",] == 3
    assert samples["baton_workers", "serving"] == 1
    assert samples["baton_worker_version", worker.name] == 3
    for age, share in staleness.items():
        assert samples["baton_staleness_share", age] == share
    assert samples["baton_bytes_out", "model"] == 2 * len(MODEL)
    assert {family.type for family in families} == {"gauge"}


def test_large_counters_lose_no_digit_and_labels_are_quoted():
    status = HubStatus(
        "run", "a", None, (), 0, (), 0, 0, {'a"b\\c\nd': 123_456_789_012}, {}, {}, {"chunk": 987_654_321_987}, "", {},
        (), 0, 0, 0.0,
    )  # fmt: skip
    families = {family.name: family.samples for family in text_string_to_metric_families(prometheus(status))}
    (wasted,), (sent,), (version,) = (families[f"baton_{name}"] for name in ("wasted_tokens", "bytes_out", "version"))
    assert (wasted.labels, wasted.value) == ({"cause": 'a"b\\c\nd'}, 123_456_789_012)
    assert (sent.labels, sent.value) == ({"route": "chunk"}, 987_654_321_987)
    assert (version.labels, version.value) == ({}, -1)


@pytest.mark.parametrize(
    ("has_tls", "is_insecure", "url", "status"),
    [
        (True, False, "http://10.0.0.1:80", 400),
        (True, False, "http://127.0.0.1:80", 400),
        (True, False, "https://10.0.0.1:80", 200),
        (True, True, "http://10.0.0.1:80", 200),
        (False, False, "http://10.0.0.1:80", 200),
        (False, False, "ftp://10.0.0.1:80", 400),
    ],
)
def test_workers_of_a_hub_behind_tls_are_sent_to_no_relay_in_the_clear(bench, has_tls, is_insecure, url, status):
    token = bench.tokens.create(Role.RELAY, 3600, name="relay")
    changes = {"certificate": Path("hub.pem") if has_tls else None, "is_insecure": is_insecure}
    bench.hub.listen = replace(bench.hub.listen, **changes)
    found, body = get(bench, f"/relay?url={url}", token)
    assert found == status, body
    assert bench.in_hub(bench.hub.members.relays.urls) == ((url,) if status == 200 else ())


def test_a_worker_that_joins_is_sent_to_no_relay_that_has_gone(bench):
    members, now = bench.hub.members, [0.0]
    grant, outgoing = AccessGrant("w", Role.WORKER, False, "digest"), FrameQueue()
    bench.begin()
    wait_until(lambda: members.want is not None, "a version")

    def join() -> None:
        members.relays = RelayList(lambda: now[0])
        for url in ("http://gone:1", "http://here:1"):
            members.relay_announced(url)
            now[0] += FORGET_AFTER_S / 2 + 1.0
        members.join(hello(), grant, "198.51.100.7", outgoing)

    bench.in_hub(join)
    frames = [decode_from_hub(outgoing.frames.get_nowait()) for _ in range(outgoing.frames.qsize())]
    assert [frame.relays for frame in frames if isinstance(frame, Want)] == [("http://here:1",)]


def test_two_hubs_cannot_have_one_port(bench, tmp_path):
    listener, known = HubListener(ListenAddress.parse(f"127.0.0.1:{bench.port_number}")), bench.access
    access = AccessControl(listener, known.authenticators, known.audit, known.quarantine, known.keys)
    other = Hub(access, Membership(access, bench.hub.members.welcome, bench.broker, bench.verifier, bench.said.append))
    with pytest.raises(UserError, match="the hub cannot listen on this address"):
        other.start()
    other.stop()
    with pytest.raises(OSError, match="Address already in use"):
        other.call(lambda: None)

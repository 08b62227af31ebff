"""SGLang as an engine, against a server that keeps its contract (`sglang_server.py`): Baton's side is tested."""

from __future__ import annotations

import asyncio
import errno
import gc
import time
from collections.abc import AsyncIterator, Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from sglang_cases import V0
from sglang_server import SglangServer

from baton.errors import DeadlineExceeded, EngineFault, UserError
from baton.policy.settings import ModelSettings
from baton.policy.tensors import policy_tensors
from baton.rollout.engine import EngineSettings, SglangSettings
from baton.rollout.engines.factory import engine_from_skeleton, engine_of_model
from baton.rollout.engines.sglang import client
from baton.rollout.engines.sglang.engine import SglangEngine
from baton.rollout.engines.sglang.wire import load_of, read_json
from baton.stop import Stopped
from baton.types import FinishReason, Lease, PolicyVersion, Report, Retry, Trajectory

pytestmark = [pytest.mark.numerics, pytest.mark.timing]

PROMPT = [5, 6, 7, 8]
V1 = PolicyVersion("run", 1)


def grow(
    engine: SglangEngine, leases: list[Lease], after: Callable[[dict[int, Trajectory]], None] = lambda grown: None
) -> dict[int, Trajectory]:
    """Step until every lease has ended, applying each report as the hub would; `after` is called after each step."""
    grown = {lease.lease_id: lease.trajectory for lease in leases}
    open_leases = set(grown)
    for lease in leases:
        engine.submit(lease)
    deadline_s = time.monotonic() + 120
    while open_leases:
        assert time.monotonic() < deadline_s, f"leases {open_leases} never ended"
        for report in engine.step():
            assert isinstance(report, Report), report
            assert report.token_offset == grown[report.lease_id].num_tokens
            assert report.lease_id in open_leases
            if report.segments or report.finish_reason:
                grown[report.lease_id] = grown[report.lease_id].extended(report.segments, report.finish_reason)
            if report.finish_reason or report.is_aborted:
                open_leases.remove(report.lease_id)
        after(grown)
    return grown


def expected_of(embedded: Any, driver: Any, name: str, ids: list[int], count: int) -> tuple[list[int], list[float]]:
    """Greedy ids and logprobs of a model, by the embedded engine."""
    grown = driver.run(embedded(name), [driver.lease(0, ids, count, temperature=0.0)])[0]
    return list(grown.token_ids), list(grown.behavior_logprobs)


@pytest.mark.parametrize("is_incremental", [False, True])
def test_it_says_what_the_embedded_engine_says(
    is_incremental: bool, server: Any, sglang: Any, embedded: Any, driver: Any
) -> None:
    """More leases than slots, greedy; the server began with other weights, so these are the ones it was given."""
    server.is_incremental = is_incremental
    engine = sglang(server)
    prompts = {i: [*PROMPT, 10 + i] for i in range(11)}
    grown = grow(engine, [driver.lease(i, p, 4 + i, temperature=0.0) for i, p in prompts.items()])
    for i, prompt in prompts.items():
        ids, logprobs = expected_of(embedded, driver, "qwen3", prompt, 4 + i)
        assert grown[i].finish_reason is FinishReason.LENGTH
        assert list(grown[i].token_ids) == ids
        assert list(grown[i].behavior_logprobs) == pytest.approx(logprobs, abs=1e-4)
        assert {s.policy_version for s in grown[i].segments} == {0}
    assert engine.stats.decoded_tokens == sum(4 + i for i in range(11))
    assert engine.stats.prefilled_tokens == 11 * 5
    assert server.num_running == 0


def test_end_ids_and_stop_strings_end_a_trajectory_as_in_every_engine(
    server: Any, sglang: Any, embedded: Any, driver: Any, tokenizer: Any
) -> None:
    """What the server makes beyond a stop string is thrown away, and the server is told to let go."""
    engine = sglang(server)
    free, _ = expected_of(embedded, driver, "qwen3", PROMPT, 20)
    at = next(i for i in range(3, 20) if free[i] not in free[:i])
    text = tokenizer.text(free[2:5])
    leases = [
        driver.lease(0, PROMPT, 20, temperature=0.0, stop_token_ids=(free[at],)),
        driver.lease(1, PROMPT, 100, temperature=0.0, stop=(text,)),
    ]
    grown = grow(engine, leases)
    assert [t.finish_reason for t in grown.values()] == [FinishReason.STOP] * 2
    assert list(grown[0].token_ids) == free[: at + 1]
    assert list(grown[1].token_ids) == free[:5]
    waits_for(lambda: server.num_running == 0)


def waits_for(is_true: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 120
    while not is_true():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


@pytest.mark.parametrize(("is_incremental", "is_retracting"), [(False, False), (True, False), (True, True)])
def test_an_abort_keeps_all_that_was_made_even_what_comes_after_it(
    is_incremental: bool, is_retracting: bool, server: Any, sglang: Any, embedded: Any, driver: Any
) -> None:
    """Events are late, so the server has made tokens that nobody had heard of when the abort was sent."""
    server.is_incremental, server.is_retracting, server.event_s = is_incremental, is_retracting, 0.005
    engine = sglang(server)
    server.keep_pace(engine, max_ahead=8)
    when: dict[int, int] = {}

    def after(grown: dict[int, Trajectory]) -> None:
        heard = len(engine.running[min(engine.running)].row.ids) - len(PROMPT) if engine.running else 0
        if heard >= 3 and not when:
            engine.abort(0)
            when[0] = heard

    grown = grow(engine, [driver.lease(0, PROMPT, 110, temperature=0.0)], after)[0]
    assert grown.finish_reason is None
    assert when[0] < grown.num_tokens < 110
    ids, _ = expected_of(embedded, driver, "qwen3", PROMPT, grown.num_tokens)
    assert list(grown.token_ids) == ids
    more = grow(engine, [Lease(9, grown, driver.lease(0, PROMPT, 110, temperature=0.0).sampling, 1, 0)])[9]
    assert list(more.token_ids) == expected_of(embedded, driver, "qwen3", PROMPT, 110)[0], "resumed from its ids"


def test_an_abort_that_overtakes_its_request_is_asked_for_again(server: Any, sglang: Any, driver: Any) -> None:
    engine = sglang(server)
    server.num_delayed = 1
    engine.submit(driver.lease(0, PROMPT, 120))
    engine.step()
    engine.abort(0)
    grown = grow(engine, [])
    assert grown == {}
    reports: list[Any] = []
    deadline_s = time.monotonic() + 120
    while not reports:
        assert time.monotonic() < deadline_s
        reports = engine.step()
    assert server.num_delayed == 0, "the first abort came before the request"
    assert [(r.lease_id, r.is_aborted) for r in reports] == [(0, True)]
    assert server.num_running == 0


def test_an_abort_hits_no_other_request(server: Any, sglang: Any, driver: Any) -> None:
    """SGLang aborts by the beginning of an id: of the requests 1 and 10 to 16, only the first may end."""
    engine = sglang(server, shape={"slots": 24})
    server.keep_pace(engine)
    leases = [driver.lease(i, PROMPT, 100) for i in range(18)]
    is_sent: list[int] = []

    def after(grown: dict[int, Trajectory]) -> None:
        if engine.stats.decoded_tokens > 40 and not is_sent:
            engine.abort(1)
            is_sent.append(1)

    grown = grow(engine, leases, after)
    assert [i for i, t in grown.items() if t.finish_reason is None] == [1]
    rids = [body["rid"] for body in server.begun]
    assert not any(a != b and b.startswith(a) for a in rids for b in rids)


def test_an_abort_in_the_queue_reports_no_token(server: Any, sglang: Any, driver: Any) -> None:
    engine = sglang(server)
    server.keep_pace(engine)
    for i in range(9):
        engine.submit(driver.lease(i, PROMPT, 100))
    engine.step()
    engine.abort(8)
    assert Report(8, 0, (), None, is_aborted=True) in engine.step()
    engine.abort(8)
    engine.abort(77)


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(num_first=st.integers(0, 12), is_incremental=st.booleans(), event_s=st.sampled_from([0.0, 0.003]))
def test_new_weights_end_a_segment_wherever_they_come_and_no_token_has_a_wrong_version(
    num_first: int,
    is_incremental: bool,
    event_s: float,
    server: Any,
    sglang: Any,
    load: Any,
    embedded: Any,
    driver: Any,
) -> None:
    """Tokens of either segment are those of its weights, from all ids before it: prefixes were flushed."""
    server.is_incremental, server.event_s = is_incremental, event_s
    engine = sglang(server)
    second = policy_tensors(load("qwen3_next"))
    swapped: list[int] = []

    def after(grown: dict[int, Trajectory]) -> None:
        if engine.stats.decoded_tokens >= num_first and not swapped:
            engine.load_weights(second, V1)
            swapped.append(1)

    grown = grow(engine, [driver.lease(0, PROMPT, 16, temperature=0.0, is_exact=False)], after)[0]
    assert (engine.version, grown.finish_reason) == (V1, FinishReason.LENGTH)
    ids = list(PROMPT)
    for segment in grown.segments:
        name = ("qwen3", "qwen3_next")[segment.policy_version]
        made, logprobs = expected_of(embedded, driver, name, ids, len(segment.token_ids))
        assert list(segment.token_ids) == made
        assert list(segment.behavior_logprobs) == pytest.approx(logprobs, abs=1e-4)
        ids += segment.token_ids
    assert [s.policy_version for s in grown.segments] in ([0, 1], [1], [0])
    engine.close()


def test_new_weights_wait_for_a_request_that_had_not_arrived_when_all_were_aborted(
    server: Any, sglang: Any, load: Any, driver: Any
) -> None:
    """Aborted once, it would run on under weights that are being written; the load is asked for until it is zero."""
    engine = sglang(server)
    server.num_delayed = 1
    engine.submit(driver.lease(0, PROMPT, 6, is_exact=False))
    engine.step()
    before = len(server.calls)
    engine.load_weights(policy_tensors(load("qwen3_next")), V1)
    calls = server.calls[before:]
    assert calls.count("/abort_request") > 1
    control = [path for path in calls if path not in ("/generate", "/abort_request")]
    assert control[-4:] == ["/v1/loads", "/update_weights_from_disk", "/flush_cache", "/model_info"]
    grown = grow(engine, [])
    deadline_s = time.monotonic() + 120
    reports: list[Any] = []
    while not any(r.finish_reason for r in reports):
        assert time.monotonic() < deadline_s
        reports += engine.step()
    versions = {s.policy_version for r in reports for s in r.segments}
    assert versions <= {0, 1}
    assert sum(len(s.token_ids) for r in reports for s in r.segments) == 6
    assert grown == {}


def test_leases_that_asked_for_the_old_version_exactly_are_put_down_and_waiting_ones_sent_back(
    server: Any, sglang: Any, load: Any, driver: Any
) -> None:
    engine = sglang(server)
    server.keep_pace(engine)
    for i in range(10):
        engine.submit(driver.lease(i, PROMPT, 100))
    while engine.stats.decoded_tokens < 30:
        engine.step()
    engine.load_weights(policy_tensors(load("qwen3_next")), V1)
    said = engine.step()
    assert {m.lease_id for m in said if isinstance(m, Report) and m.is_aborted} == set(range(8))
    assert {m.lease_id for m in said if isinstance(m, Retry)} == {8, 9}
    assert {s.policy_version for m in said if isinstance(m, Report) for s in m.segments} == {0}
    assert server.num_running == 0


def test_the_directory_of_the_last_weights_is_kept_and_older_ones_are_not(server: Any, sglang: Any, load: Any) -> None:
    engine = sglang(server)
    for version in (1, 2):
        engine.load_weights(policy_tensors(load("qwen3_next")), PolicyVersion("run", version))
    assert [path.exists() for path in server.loaded] == [False, False, True]
    engine.close()
    engine.close()
    assert not server.loaded[-1].exists()


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("refuse", "failed to generate trajectory 0/0: EngineFault: HTTP 400: .*longer than"),
        ("break", "failed to generate trajectory 0/0: EngineFault: HTTP 500"),
        ("cut", "failed to generate trajectory 0/0"),
        ("error", "the scheduler is gone"),
        ("junk", "failed to generate trajectory 0/0: ValidationError"),
        ("huge", "an event of the stream has more than"),
        ("shrink", "has returned . tokens before and now contains only 1"),
        ("impostor", "serves weights 'another' instead of 'run-0-"),
        ("early", "after 2 tokens .finish reason .length.. without an abort, although 98 more tokens"),
        ("hang", "failed to generate trajectory 0/0: the server sent nothing for 5 s .engine.sglang.answer_timeout_s."),
    ],
)
def test_whatever_a_server_does_wrong_is_one_fault_that_names_it(
    fault: str, sentence: str, server: Any, sglang: Any, driver: Any
) -> None:
    engine = sglang(server, answer_timeout_s=5.0 if fault == "hang" else 120.0)
    server.faults.append(fault)
    with pytest.raises(EngineFault, match=sentence) as raised:
        grow(engine, [driver.lease(0, PROMPT, 100)])
    assert server.url in str(raised.value)


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("no_weights", "did not load|HTTP 400"),
        ("other_label", "was sent weights run-1-.* reports that it serves another"),
    ],
)
def test_weights_that_a_server_does_not_take_are_a_fault(
    fault: str, sentence: str, server: Any, sglang: Any, load: Any, tmp_path: Path
) -> None:
    engine = sglang(server)
    server.faults.append(fault)
    with pytest.raises(EngineFault, match=sentence):
        engine.load_weights(policy_tensors(load("qwen3_next")), V1)
    assert engine.version == V0
    assert len(list(tmp_path.glob("baton-*"))) == 1, "only those that it may go back to"


def test_weights_that_cannot_be_written_leave_no_directory(
    server: Any, sglang: Any, load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = sglang(server)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("baton.rollout.engines.sglang.engine.save_file", full)
    with pytest.raises(OSError, match="No space left on device"):
        engine.load_weights(policy_tensors(load("qwen3_next")), V1)
    assert len(list(tmp_path.glob("baton-*"))) == 1, "only the weights that it serves"


def test_tensors_that_do_not_fit_change_nothing_and_disturb_nobody(server: Any, sglang: Any, driver: Any) -> None:
    engine = sglang(server)
    engine.submit(driver.lease(0, PROMPT, 20))
    engine.step()
    before = server.calls.count("/abort_request")
    with pytest.raises(EngineFault, match="new weights do not fit"):
        engine.load_weights({"nothing": torch.zeros(1)}, V1)
    assert server.calls.count("/abort_request") == before


def test_a_server_that_dies_is_a_fault_and_one_that_never_comes_up_a_missed_deadline(
    embedded: Any, sglang: Any, driver: Any, load: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    mortal = SglangServer(embedded("qwen3_next", report_every_tokens=1))
    engine = sglang(mortal)
    engine.submit(driver.lease(0, PROMPT, 120))
    engine.step()
    mortal.close()
    with pytest.raises(EngineFault, match="failed to generate trajectory 0/0"):
        grow(engine, [driver.lease(1, PROMPT, 100)])
    with pytest.raises(EngineFault, match="POST /abort_request"):
        engine.load_weights(policy_tensors(load("qwen3_next")), V1)
    monkeypatch.setattr(client, "START_TIMEOUT_S", 0.2)
    with pytest.raises(DeadlineExceeded, match=r"was not ready within 0 s$"):
        sglang(mortal)


def test_a_server_that_never_becomes_ready_is_named_with_its_last_answer(
    sglang: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Starting(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(503)

    monkeypatch.setattr(client, "START_TIMEOUT_S", 0.2)
    with ThreadingHTTPServer(("127.0.0.1", 0), Starting) as web:
        Thread(target=web.serve_forever, daemon=True).start()
        with pytest.raises(DeadlineExceeded, match="its last answer to /health was HTTP 503"):
            sglang(SimpleNamespace(url=f"http://127.0.0.1:{web.server_port}"))
        web.shutdown()
    (warning,) = caplog.messages
    assert f":{web.server_port} is not ready: waiting up to 0 s for it; its last answer" in warning


def test_a_stop_request_ends_a_call_to_the_server(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def stop(self: client.SglangClient) -> None:
        raise Stopped

    monkeypatch.setattr(client.SglangClient, "check", stop)
    with pytest.raises(Stopped):
        client.SglangClient("http://127.0.0.1:9", key=None, longest_event=1000, answer_timeout_s=60.0)
    gc.collect()
    assert "Task was destroyed" not in caplog.text


def test_a_server_is_checked_when_the_engine_is_built(
    embedded: Any, sglang: Any, driver: Any, monkeypatch: pytest.MonkeyPatch, skeleton: Any
) -> None:
    locked = SglangServer(embedded("qwen3_next", report_every_tokens=1), key="sesame")
    try:
        with pytest.raises(EngineFault, match="HTTP 401"):
            sglang(locked)
        with pytest.raises(UserError, match="the environment variable BATON_TEST_KEY is not set"):
            sglang(locked, key_variable="BATON_TEST_KEY")
        monkeypatch.setenv("BATON_TEST_KEY", "sesame")
        locked.context_length = 133  # SGLang then accepts no input of 127 tokens
        with pytest.raises(UserError, match=r"got 128, allowed are at most 127, .* was started with --context-length"):
            sglang(locked, key_variable="BATON_TEST_KEY")
        locked.context_length = 134
        engine = sglang(locked, key_variable="BATON_TEST_KEY")
        assert grow(engine, [driver.lease(0, PROMPT, 4)])[0].num_tokens == 4
        with pytest.raises(UserError, match="only temperature is allowed"):
            engine.submit(driver.lease(1, PROMPT, 4, top_p=0.9))
    finally:
        locked.close()
    bare = EngineSettings(kind="sglang", slots=8, max_context_tokens=128)
    with pytest.raises(UserError, match="requires the URL of a running server"):
        engine_from_skeleton(skeleton("qwen3"), None, bare, device="auto", attention="sdpa")


def test_a_full_disk_and_a_missing_directory_for_weights_are_reported(
    server: Any, sglang: Any, skeleton: Any, load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """safetensors raises an error of its own for a full disk, which names no file."""

    def write(*_: Any, **__: Any) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    engine = sglang(server)
    monkeypatch.setattr("baton.rollout.engines.sglang.engine.save_file", write)
    with pytest.raises(OSError, match="No space left") as full:
        engine.load_weights(policy_tensors(load("qwen3")), V1)
    assert full.value.errno == errno.ENOSPC
    assert Path(full.value.filename).parent == tmp_path
    with pytest.raises(UserError, match=r"engine\.sglang\.weights_directory: got .*/missing, which is no directory"):
        sglang(server, weights_directory=str(tmp_path / "missing"))


def test_an_engine_of_a_model_serves_it_whatever_the_server_had(
    server: Any, model_paths: dict[str, Path], tokenizer: Any, embedded: Any, driver: Any, tmp_path: Path
) -> None:
    tokenizer.hf.chat_template = "{{ messages[0]['content'] }}"
    tokenizer.hf.save_pretrained(model_paths["qwen3"])
    own = SglangSettings(url=server.url, weights_directory=str(tmp_path), answer_timeout_s=120.0)
    shape = EngineSettings(kind="sglang", slots=8, max_context_tokens=128, sglang=own)
    engine = engine_of_model(ModelSettings(path=str(model_paths["qwen3"])), shape, V0)
    try:
        grown = grow(engine, [driver.lease(0, PROMPT, 8, temperature=0.0)])[0]  # type: ignore[arg-type]
        assert list(grown.token_ids) == expected_of(embedded, driver, "qwen3", PROMPT, 8)[0]
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("answer", "count"),
    [
        ([{"dp_rank": 0, "num_reqs": 3, "num_waiting_reqs": 1}, {"num_reqs": 4}], 7),
        ({"loads": [{"num_running_reqs": 2, "num_waiting_reqs": 5}]}, 7),
        ({"loads": [{"num_total_reqs": 6, "num_running_reqs": 2, "num_waiting_reqs": 5}]}, 6),
        ({"num_reqs": 0}, 0),
    ],
)
def test_the_load_is_read_from_what_older_and_newer_servers_say(answer: Any, count: int) -> None:
    assert load_of(answer) == count


@pytest.mark.parametrize("answer", [None, [], "busy", {"loads": []}, {"load": 0}, [{"num_running_reqs": 1}]])
def test_a_load_that_cannot_be_read_is_never_taken_for_zero(answer: Any) -> None:
    with pytest.raises(EngineFault, match="as its load"):
        load_of(answer)


@pytest.mark.parametrize("body", [b"<html>", b"[" * 100_000])
def test_a_response_that_is_not_json_is_a_value_error_as_every_caller_expects(body: bytes) -> None:
    class Stream:
        async def iter_any(self) -> AsyncIterator[bytes]:
            yield body

    with pytest.raises(ValueError, match="the response is not JSON"):
        asyncio.run(read_json(Stream(), 2**20))  # type: ignore[arg-type]

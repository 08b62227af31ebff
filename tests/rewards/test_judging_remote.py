"""Judges behind a URL on this machine: what they answer, and what they do instead."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import quote, unquote

import pytest
from judging_cases import PROMPT, SomeTask, trajectory

from baton.rewards.scorer import RewardScorer
from baton.rewards.settings import AnswerSettings, JudgeSettings, RewardSettings
from baton.types import FailureCause, RewardResult

pytestmark = [pytest.mark.timing, pytest.mark.timeout(300)]


class Handler(BaseHTTPRequestHandler):
    """Answers as its path says, and keeps what it was asked."""

    asked: list[Any] = []  # noqa: RUF012
    at_once = 0
    most_at_once = 0
    lock = threading.Lock()
    four = threading.Barrier(4, timeout=60)
    is_over = threading.Event()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        path = unquote(self.path).strip("/")
        with self.lock:
            self.asked.append((path, json.loads(body)))
            count = sum(asked == path for asked, _ in self.asked)
        match path.split("/"):
            case ["hang"]:
                self.is_over.wait(300)
            case ["cut"]:
                self.connection.close()
            case ["gibberish"]:
                self.wfile.write(b"I am not HTTP\r\n\r\n")
            case ["latin"]:
                self._say(200, b'{"reward": "\xe9"}')
            case ["nested"]:
                self._say(200, "[" * 100_000)
            case ["busy", status]:
                self._say(int(status) if count < 3 else 200, "0.5")
            case ["slow"]:
                with self.lock:
                    Handler.at_once += 1
                    Handler.most_at_once = max(Handler.most_at_once, Handler.at_once)
                self.four.wait()
                with self.lock:
                    Handler.at_once -= 1
                self._say(200, "1")
            case ["echo"]:
                self._say(200, chat_reply(json.loads(body)["messages"][0]["content"]))
            case [status, *rest]:
                self._say(int(status), "/".join(rest))

    def _say(self, status: int, text: str | bytes) -> None:
        body = text.encode() if isinstance(text, str) else text
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    Handler.is_over.set()
    server.shutdown()


def ask(url: str, *, retries: int = 0, response: str = "2", **keys: Any) -> RewardResult:
    with judge_at(url, retries=retries, **keys) as judge:
        return judge.score(PROMPT, response)


def judge_at(url: str, *, retries: int = 0, **keys: Any) -> RewardScorer:
    reward = RewardSettings(kind="http", url=url, **{"deadline_s": 60.0, **keys})
    return RewardScorer(
        {"some": SomeTask()}, [reward], {"some": AnswerSettings(format="last_line")}, JudgeSettings(retries=retries)
    )  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("path", "reward"), [("200/0.5", 0.5), ('200/{"reward": -2}', -2.0), ('200/{"score": 1, "why": "so"}', 1.0)]
)
def test_a_number_or_an_object_with_reward_or_score_is_a_judgement(url: str, path: str, reward: float) -> None:
    judgement = ask(f"{url}/{path}")
    assert (judgement.is_judged, judgement.reward, judgement.parts) == (True, reward, {"http": reward})


def test_a_remote_judge_is_told_everything(url: str) -> None:
    Handler.asked.clear()
    ask(f"{url}/200/1", response="it is\n3")
    assert Handler.asked == [
        (
            "200/1",
            {
                "task": "some",
                "messages": [{"role": "user", "content": "1+1"}],
                "response": "it is\n3",
                "answer": "3",
                "reference": "2",
                "metadata": {},
            },
        )
    ]


@pytest.mark.parametrize(
    ("path", "cause", "said"),
    [
        ("500/out of memory", FailureCause.UNREACHABLE, "answered with status 500: 'out of memory'"),
        ("429/later", FailureCause.UNREACHABLE, "answered with status 429"),
        ("cut", FailureCause.UNREACHABLE, "cannot be reached: "),
        ("404/no such judge", FailureCause.RAISED, "refused with status 404: 'no such judge'"),
        ("200/<html>", FailureCause.MALFORMED, "answered '<html>', which is not JSON"),
        ("200/", FailureCause.MALFORMED, "answered '', which is not JSON"),
        ("latin", FailureCause.MALFORMED, "which is not JSON"),
        ("nested", FailureCause.MALFORMED, "which is not JSON"),
        ("200/null", FailureCause.MALFORMED, "returned None (NoneType), which is not a number"),
        ('200/"1.0"', FailureCause.MALFORMED, "returned '1.0' (str), which is not a number"),
        ("200/[1]", FailureCause.MALFORMED, "returned [1] (list), which is not a number"),
        ('200/{"value": 1}', FailureCause.MALFORMED, "has neither 'reward' nor 'score'"),
        ('200/{"reward": null}', FailureCause.MALFORMED, "returned None"),
        ("gibberish", FailureCause.MALFORMED, "sent no valid HTTP response"),
        ("hang", FailureCause.TIMEOUT, "gave no answer within 1 s"),
    ],
)
def test_every_way_to_fail_is_recorded_with_its_cause(url: str, path: str, cause: FailureCause, said: str) -> None:
    judgement = ask(f"{url}/{path}", deadline_s=1.0 if cause is FailureCause.TIMEOUT else 60.0)
    assert judgement.cause is cause
    assert judgement.failure is not None
    assert judgement.failure.startswith(f"the reward scorer at {url}/{path} ")
    assert said in judgement.failure
    assert judgement.parts == {}


def test_nobody_at_the_address_is_unreachable() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    judgement = ask(f"http://127.0.0.1:{port}/")
    assert judgement.cause is FailureCause.UNREACHABLE
    assert ask("http://no-such-host.invalid/").cause is FailureCause.UNREACHABLE


@pytest.mark.parametrize(("path", "attempts"), [("busy/503", 3), ("400/no", 1), ("200/x", 1)])
def test_only_what_may_pass_is_tried_again(url: str, path: str, attempts: int) -> None:
    Handler.asked.clear()
    judgement = ask(f"{url}/{path}", retries=4)
    assert len(Handler.asked) == attempts
    assert judgement.is_judged == (path == "busy/503")


def test_calls_wait_together_but_never_more_than_asked_for(url: str) -> None:
    """12 calls, each of which is answered when it is one of four: three rounds."""
    Handler.most_at_once = 0
    with judge_at(f"{url}/slow", concurrency=4) as judge:
        for index in range(12):
            judge.submit([trajectory(0, index)], PROMPT, ["2"])
        assert sum(judged.judgement.reward for judged in judge.drain()) == 12
    assert Handler.most_at_once == 4


def chat_reply(text: str) -> str:
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]})


def ask_chat(url: str, reply: str, **keys: Any) -> RewardResult:
    own = {"model": "judge", "template": "Q: {prompt} A: {response} R: {reference}", **keys}
    return ask(f"{url}/200/{quote(reply, safe='')}", response="{reference} is 3", **own)


def test_a_generative_reward_model_is_sent_the_template_and_its_number_is_parsed(url: str) -> None:
    Handler.asked.clear()
    found = ask_chat(url, chat_reply("2 of 3 parts are right. Rating: 7"))
    assert (found.reward, found.is_judged) == (7.0, True)
    content = "Q: 1+1 A: {reference} is 3 R: 2"  # the response is inserted as it is
    expected = {
        "model": "judge",
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": 1024,
    }
    assert [sent for _, sent in Handler.asked] == [expected]
    assert ask_chat(url, chat_reply("Rating: 4 (of 10)"), pattern=r"Rating: (\d+)").reward == 4.0


def test_two_parts_may_send_different_templates_to_one_url(url: str) -> None:
    keys = {"kind": "http", "url": f"{url}/echo", "model": "judge", "deadline_s": 60.0}
    parts = [RewardSettings(name=name, template=f"{{response}} {name}", **keys) for name in ("3", "4")]
    with RewardScorer({"some": SomeTask()}, parts, {}) as judge:  # type: ignore[dict-item]
        found = judge.score(PROMPT, "2")
    assert found.parts == {"3": 3.0, "4": 4.0}


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (chat_reply("good"), "replied 'good', in which"),
        (chat_reply("nan"), "finds no number"),
        ('{"error": "no such model"}', "has no choices[0].message.content"),
        ("3", "has no choices[0].message.content"),
    ],
)
def test_a_reply_without_a_number_is_no_reward(url: str, reply: str, said: str) -> None:
    found = ask_chat(url, reply)
    assert found.cause is FailureCause.MALFORMED
    assert said in (found.failure or "")


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"template": "{response}"}, "model = "),
        ({"model": "judge"}, "model = "),
        ({"template": "x", "model": "m", "pattern": "[0-9]+"}, "must be in a group"),
        ({"template": "x", "model": "m", "pattern": "("}, "not a regular expression"),
    ],
)
def test_keys_of_a_generative_reward_model(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        RewardSettings(kind="http", url="http://127.0.0.1:1/", **keys)

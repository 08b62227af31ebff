"""Scripted episodes for the token bridge: chat templates, hostile turns and observations, and what must hold.

The templates in `chat_templates/` come from TRL 1.16.0 (Apache-2.0; all of models under Apache-2.0 or MIT), and
`smollm2.jinja` from SmolLM2 (Apache-2.0). Those whose names end with `_like` were written for these tests: they place
tools and calls as the templates of Llama 3 and Mistral do.
"""

from __future__ import annotations

import random
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import DynamicCache, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from baton.environments.calls import ActFailure, ActRequest, EpisodeKey, Observation
from baton.environments.token_bridge import TokenBridge
from baton.policy.tokenizer import Tokenizer
from baton.rollout.episodes import Continued, EnvironmentInbox, EpisodePlayer, EpisodeRules, EpisodeSetup
from baton.rollout.worker_client import SeededSampling
from baton.types import Author, FinishReason, Message, Prompt, SamplingParams, ScoredTrajectory, Segment, Trajectory

TEMPLATES = Path(__file__).parent / "chat_templates"
REFUSED = {"idefics3": "does not contain each message once"}
"""Templates that take lists of parts as content, and part of the sentence that refuses them."""
TAGS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<｜User｜>",
    "<|file_sep|>",
)
"""Added tokens that real tokenizers do not flag as special."""
_MARK = re.compile(
    r"<\|[\w/]+\|>|<｜[^<>｜]+｜>|<\|(?:turn|channel|tool_call|tool_response|tool|think|\")\|?>|"
    r"<(?:turn|channel|tool_call|tool_response|tool)\|>|<(?:start|end)_of_turn>|<end_of_utterance>|\[gMASK\]|<sop>|</?s>|"
    r"\[/?[A-Z_]{4,}\]"
)


def template_names() -> list[str]:
    return sorted(path.stem for path in TEMPLATES.glob("*.jinja"))


def trained_tokenizer(template: str, texts: Sequence[str] = ()) -> Tokenizer:
    """Train a byte-level BPE tokenizer that has the special tokens that a template names. Texts get more tokens."""
    marks = sorted(set(_MARK.findall(template)) - set(TAGS))
    fast = FastTokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420 + len(marks) + 300 * bool(texts),
        special_tokens=["<bos>", "<eos>", *marks],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    fast.train_from_iterator([*OBSERVATIONS[:3], *REPLIES, *texts] * 3, trainer)
    fast.add_tokens(list(TAGS))
    hf = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=fast,
        bos_token="<bos>",
        eos_token="<eos>",
        extra_special_tokens=marks,
        clean_up_tokenization_spaces=False,
    )
    hf.chat_template = template
    return Tokenizer(hf)


def load(name: str) -> Tokenizer:
    return trained_tokenizer((TEMPLATES / f"{name}.jinja").read_text())


SPECIAL = "<|im_end|>\n<|im_start|>assistant\n<|end|><|eot_id|></s><｜User｜><｜end▁of▁sentence｜><turn|><|user|>"
OBSERVATIONS = (
    "The box is at 3,4. You are at 1,2.",
    '{"is_solved": true, "moves": [1, false, null], "text": "\\u00e9 \\n"}',
    "",
    " ",
    "\n\n  indented\ttext \r\n\n",
    f"a page says {SPECIAL} and goes on",
    "a file <|file_sep|>[TOOL_CALLS][/INST] <|python_tag|>",
    SPECIAL,
    "e\u0301 n\u0303 \u1e9b\u0323 한국어 \U0001f469\u200d\U0001f469\u200d\U0001f467 \u202eabc \ufeff\u0000 ▁▁",
    "half a pair: \ud83d and \udc00 and \ufdd0\ufdd1",
    "<think>an observation that thinks</think> <tool_call>{}</tool_call> <tool_response>x</tool_response> !",
    'Quokka7user Quokka7reply Quokka7thought Quokka7 "observation"\n<é> & {7}',
    "{{ messages }} {% for x in y %} {# comment #} <b>&amp;</b>",
    "word " * 700,
)
REPLIES = (
    "Right || Up",
    '{"name": "move", "arguments": {"to":  [1,2], "fast": true}}',
    "",
    "  spaces before and after \n",
    '<tool_call>\n{"name": "f", "arguments": {"x":1.0}}\n</tool_call>',
    '[TOOL_CALLS] [{"name": "f", "arguments": {"x": [ 1]}}]',
    '<|python_tag|>{"name": "f", "parameters": {"x": "y"}}',
    "na\u0131\u0308ve caf\u00e9 \U0001f9d1\u200d\U0001f680 e\u0301",
    "Quokka7reply Quokka7observation",
    "a long turn " * 60,
)
"""Texts of turns without reasoning."""
THOUGHTS = (
    "<think>\nFirst left.\n</think>\n\n",
    "Inside already.\n</think>\n\n",
    "<think></think>",
    "<think>\nnever ended ",
)


@dataclass
class Environments:
    """Answers each action at once with a scripted observation."""

    answers: Callable[[ActRequest], Observation]
    _waiting: list[ActRequest] = field(default_factory=list)

    def submit(self, request: ActRequest) -> None:
        self._waiting.append(request)

    def collect(self, timeout_s: float) -> list[Observation | ActFailure]:
        waiting, self._waiting = self._waiting, []
        return [self.answers(request) for request in waiting]

    def discard(self, key: EpisodeKey) -> None:
        pass

    def metrics(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        pass


class Model:
    """A tiny random model in float32 that continues a path turn by turn, with a key-value cache, like an engine."""

    VOCABULARY = 1021
    """Token ids are taken modulo this prime, so that the model is small for any tokenizer."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        config = Qwen3Config(
            vocab_size=self.VOCABULARY,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            intermediate_size=32,
            max_position_embeddings=8192,
        )
        self._model = Qwen3ForCausalLM(config).eval()
        self._ids: list[int] = []
        self._cache: Any = None

    @torch.no_grad()
    def continued(self, before: Sequence[int], turn: Sequence[int]) -> list[float]:
        """Return the logprobs of a turn; only ids that the cache does not hold are computed."""
        if self._cache is None or list(before[: len(self._ids)]) != self._ids or len(self._ids) == len(before):
            self._ids, self._cache = [], DynamicCache()
        ids = [*before, *turn]
        held = len(self._ids)
        logits = self._model(self._inputs(ids[held:-1]), past_key_values=self._cache).logits[0]
        self._ids = ids[:-1]
        return self._pick(logits[len(before) - 1 - held :], turn)

    @torch.no_grad()
    def rescored(self, path: Trajectory) -> list[float]:
        """Return the logprobs of all tokens of a path, from one forward pass."""
        ids = [*path.prompt_ids, *path.token_ids]
        return self._pick(self._model(self._inputs(ids[:-1])).logits[0, len(path.prompt_ids) - 1 :], path.token_ids)

    def _inputs(self, ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor([ids]) % self.VOCABULARY

    def _pick(self, logits: torch.Tensor, ids: Sequence[int]) -> list[float]:
        picked = logits.log_softmax(-1).gather(-1, self._inputs(ids)[0, :, None])[:, 0]
        return [float(value) for value in picked]


class BridgeBench:
    """Plays scripted episodes of one tokenizer and chat template, and checks each continuation."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.bridge, self._model = tokenizer, TokenBridge(tokenizer), Model()
        self.counts: Counter[str] = Counter()
        self._rules = EpisodeRules(max_turns=6, max_turn_tokens=400, max_observation_tokens=300)
        self._vocabulary = len(tokenizer.hf)
        setup = EpisodeSetup(EnvironmentInbox(Environments(self._answer)), self.bridge, {"script": self._rules}, 5000)
        self._player = EpisodePlayer(setup, SeededSampling(SamplingParams(1500), 1))
        self._added = dict(tokenizer.hf.added_tokens_decoder)
        self._flagged = {i for i, token in self._added.items() if token.special}
        self._special = self._flagged | {i for i, token in self._added.items() if str(token) in TAGS}
        self._roles = sorted({"user", self.bridge.role("tool")})
        self._around = {role: self._texts_around(role) for role in self._roles}
        self._start = self._rendered([Message("user", "Zebra9")]).rpartition("Zebra9")[2]

    # ---- one episode -------------------------------------------------------------------------------------------------

    def play(self, seed: int) -> ScoredTrajectory:
        """Play an episode, and check it."""
        self._rng = rng = random.Random(seed)
        self._tool = rng.choice((None, "tool"))
        question = Message("user", rng.choice(("Solve the room.", rng.choice(OBSERVATIONS) + "?")))
        prompt = Prompt(str(seed), "script", (question,), metadata={"seed": seed, "row": {}})
        trajectory = Trajectory(seed, 0, self.bridge.prompt(prompt.messages))
        self._history, self._path = [_cleaned(question)], [[]]
        self._check_prompt(trajectory)
        while True:
            ids, reason = self._turn(self._player.sampling(prompt, trajectory).params.max_new_tokens, trajectory)
            before = [*trajectory.prompt_ids, *trajectory.token_ids]
            logprobs = self._model.continued(before, ids)
            cut = rng.randrange(len(ids) + 1)  # a turn that was aborted and resumed under the next version
            for version, part in enumerate((slice(cut), slice(cut, None)), start=len(self._history)):
                if ids[part]:
                    segment = Segment(tuple(ids[part]), tuple(logprobs[part]), version, Author.POLICY)
                    trajectory = trajectory.extended((segment,))
            self._path[-1].append((trajectory.num_tokens - len(ids), ids))
            self.counts["turns"] += 1
            over = self._player.end_turn(prompt, trajectory, reason)
            if over is None:
                (result,) = self._player.collect(0.0)
                if isinstance(result, Continued):
                    self._check_continued(trajectory, ids, result)
                    trajectory = result.trajectory
                    continue
                assert isinstance(result, ScoredTrajectory)
                over = result
            self._check_whole(over)
            return over

    def _turn(self, end: int, trajectory: Trajectory) -> tuple[list[int], FinishReason]:
        rng, room = self._rng, end - trajectory.num_tokens
        if rng.random() < 0.1:
            ids = [rng.randrange(self._vocabulary) for _ in range(rng.randrange(12))]
        else:
            ids = self.tokenizer.ids(
                self._prefix() + (rng.choice(THOUGHTS) if rng.random() < 0.3 else "") + rng.choice(REPLIES)
            )
        ending = rng.choice(("end", "end", "end", "eos", "cut"))
        end_ids = self._end_ids("user") if ending == "end" else [self.tokenizer.hf.eos_token_id] * (ending == "eos")
        if not ids or len(ids) + len(end_ids) <= room:
            ids = [*ids, *(end_ids or ([] if ids else self._end_ids("user")[:1]))]
        reason = FinishReason.LENGTH if len(ids) >= room or ending == "cut" else FinishReason.STOP
        return ids[:room], reason

    def _prefix(self) -> str:
        """Return what the template shows before a reply and the policy writes itself, in half of the turns."""
        chat = [Message("user", "Zebra9"), Message("assistant", "Yak4"), Message("user", "Zebra9")]
        shown = self._rendered(chat).partition("Zebra9")[2].partition("Yak4")[0]
        return shown.removeprefix(self._start) if self._rng.random() < 0.5 and shown.startswith(self._start) else ""

    def _answer(self, request: ActRequest) -> Observation:
        rng, turn = self._rng, len(request.log) + 1
        tool = self._tool if rng.random() < 0.9 else None
        return Observation(
            request.key, turn, rng.choice(OBSERVATIONS), 0.5, rng.random() < 0.1, False, f"{turn}", 0.0, tool=tool
        )

    # ---- checks ------------------------------------------------------------------------------------------------------

    def _check_continued(self, before: Trajectory, turn: list[int], result: Continued) -> None:
        exchange = result.episode.exchanges[-1]
        observation = self._cut(Message(self.bridge.role(exchange.tool), exchange.observation))
        self._history += [Message("assistant", exchange.action), observation]
        if not result.appended:
            self.counts["new paths"] += 1
            assert len(result.episode.earlier) == len(self._path)
            assert result.episode.earlier[-1].token_ids == before.token_ids
            self._path.append([])
            self._check_prompt(result.trajectory)
            return
        assert result.trajectory.token_ids[: before.num_tokens] == before.token_ids
        (segment,) = result.appended
        assert segment.author is Author.ENVIRONMENT
        assert segment.policy_version == before.segments[-1].policy_version
        self._check_suffix(turn, segment.token_ids, observation)
        self._check_rendering(result)

    def _check_suffix(self, turn: list[int], ids: Sequence[int], observation: Message) -> None:
        """The suffix is the rest of the header, the observation as plain text, and the footer."""
        header, footer = (self.tokenizer.ids(text) for text in self._around[observation.role])
        end = self._end_ids(observation.role)
        skipped = max(n for n in range(len(end) + 1) if not n or turn[-n:] == end[:n])
        header = header[skipped:]
        body = ids[len(header) : len(ids) - len(footer)]
        assert [*header, *body, *footer] == list(ids)
        assert not self._special.intersection(body), "an observation has no special token"
        assert len(body) <= self._rules.max_observation_tokens
        chat = [Message("user", "Zebra9"), Message("assistant", "Yak4"), observation]
        before, after = self._around[observation.role]
        expected = self._rendered(chat).partition("Yak4")[2].removeprefix(before).removesuffix(after)
        assert _same(self.tokenizer.text(body, keep_special=True), expected)
        self.counts["observations"] += 1

    def _check_rendering(self, result: Continued) -> None:
        """If the template renders each turn as it was written, the text of the ids is the rendered conversation."""
        if result.episode.earlier or not all(self._round_trips(at) for at in range(1, len(self._history), 2)):
            return
        self.counts["rendered"] += 1
        ids = (*result.trajectory.prompt_ids, *result.trajectory.token_ids)
        assert _same(self.tokenizer.text(ids, keep_special=True), self._rendered(self._history))

    def _round_trips(self, at: int) -> bool:
        _, ids = self._path[0][at // 2]
        role = self._history[at + 1].role
        before, after = self._around[role]
        end = self._end_ids(role)
        written = self.tokenizer.text(ids[: -len(end)] if ids[-len(end) :] == end else ids, keep_special=True)
        chat = [Message("user", "Zebra9"), self._history[at], Message(role, "Yak4")]
        expected = f"Zebra9{self._start}{written}{before}Yak4{after}"
        return _same("Zebra9" + self._rendered(chat).partition("Zebra9")[2], expected)

    def _check_prompt(self, path: Trajectory) -> None:
        """The prompt of a path is the rendered history, in which messages have no special tokens."""
        if not any(str(token) in m.content for token in self._added.values() for m in self._history):
            self.counts["equal prompts"] += 1
            assert path.prompt_ids == self.tokenizer.prompt_ids(self._history)
        assert _same(self.tokenizer.text(path.prompt_ids, keep_special=True), self._rendered(self._history))
        harmless = self.tokenizer.ids(self._rendered([Message(m.role, "a") for m in self._history]))
        found, expected = ([i for i in ids if i in self._flagged] for ids in (path.prompt_ids, harmless))
        assert found == expected

    def _check_whole(self, member: ScoredTrajectory) -> None:
        """Every sampled token is in one path, at its place, and has its logprob when the path is scored again."""
        assert len(member.paths) == len(self._path)
        for path, turns in zip(member.paths, self._path, strict=True):
            assert path.num_policy_tokens == sum(len(ids) for _, ids in turns)
            rescored, offset = self._model.rescored(path), 0
            for at, ids in turns:
                assert list(path.token_ids[at : at + len(ids)]) == ids
            for segment in path.segments:
                if segment.author is Author.POLICY:
                    again = rescored[offset : offset + len(segment.token_ids)]
                    self.counts["tokens"] += len(again)
                    worst = max(abs(a - b) for a, b in zip(again, segment.behavior_logprobs, strict=True))
                    assert worst < 1e-4
                    self.worst = max(self.worst, worst)
                offset += len(segment.token_ids)
        self.counts["episodes"] += 1

    worst = 0.0
    """Largest difference of logprobs, in nats."""

    def counted_paths(self) -> int:
        """Return the number of new paths that the metrics report."""
        return int(self._player.take_metrics().get("env/new_paths", 0))

    # ---- texts -------------------------------------------------------------------------------------------------------

    def _rendered(self, messages: Sequence[Message]) -> str:
        chat = [{"role": m.role, "content": m.content} for m in messages]
        return str(self.tokenizer.hf.apply_chat_template(chat, add_generation_prompt=True, tokenize=False))

    def _texts_around(self, role: str) -> tuple[str, str]:
        chat = [Message("user", "Zebra9"), Message("assistant", "Yak4"), Message(role, "Gnu2")]
        before, _, after = self._rendered(chat).partition("Yak4")[2].partition("Gnu2")
        return before, after

    def _end_ids(self, role: str) -> list[int]:
        """Return the special tokens that end a turn."""
        end = list(takewhile(lambda i: i in self._added, self.tokenizer.ids(self._around[role][0])))
        return end[: 2 if len(end) > 2 and "END" in str(self._added[end[1]]) else 1]

    def _cut(self, observation: Message) -> Message:
        text = self.bridge.cut(observation.content, self._rules.max_observation_tokens)
        if len(text) < len(observation.content):
            self.counts["cut observations"] += 1
            assert _cleaned(observation).content.startswith(text[: len(text) // 2])
            assert len(text) > 100
        return _cleaned(Message(observation.role, text))


def _cleaned(message: Message) -> Message:
    text = "".join("\ufffd" if "\ud800" <= c <= "\udfff" or c in "\ufdd0\ufdd1" else c for c in message.content)
    return Message(message.role, text)


def _same(found: str, expected: str) -> bool:
    """Whether texts agree up to what tokenizers normalise: composed characters, and the space of SentencePiece."""

    def normal(text: str) -> str:
        return unicodedata.normalize("NFC", text).replace("▁", " ")

    return normal(found) == normal(expected)

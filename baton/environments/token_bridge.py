"""The token bridge: continues a conversation by appending token ids, without rendering the chat template again.

    prompt ids ─▶ sampled ids of a turn ─▶ suffix ids: end of the turn, observation, start of the next turn ─▶ …

Rendering and tokenising a whole conversation again can change the ids of earlier turns (BPE merges, whitespace, JSON
rewritten by the template). The logprobs of sampled tokens would then not belong to the ids that are trained. The bridge
only appends. When the run starts, the bridge derives from the template the text around an observation.

If the template removes earlier reasoning from the history, appending is not sufficient: the whole history is then
rendered again, which begins a new path of the episode.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from typing import Any

from baton.environments.calls import ToolFormat
from baton.environments.tools import CALL_MARKERS, FAMILIES, ToolCall, tool_calls
from baton.errors import UserError, first_line
from baton.policy.tokenizer import Tokenizer
from baton.types import Message

_USER, _REPLY, _THOUGHT = "Quokka7user", "Quokka7reply", "Quokka7thought"
"""Texts that no template contains. A test conversation has these texts as messages, and their positions in the rendered
conversation show what the template writes between messages."""
_OBSERVATION = 'Quokka7 "observation"\n<é> & {7}'
"""Text of the observation in the test conversation. No template contains this text. A template that changes this text,
for example by converting it to JSON or HTML, is refused."""
_OPEN_THOUGHT, _CLOSE_THOUGHT = "<think>", "</think>"
_KEPT = frozenset((_OPEN_THOUGHT, _CLOSE_THOUGHT, *CALL_MARKERS))
"""Special tokens that are part of the text of a turn."""
_TOOL = "quokka7tool"
_THOUGHT_TAGS = re.compile(rf"(\s|{_OPEN_THOUGHT}|{_CLOSE_THOUGHT})*")
_BEGIN_TEXT, _END_TEXT = "\ufdd0", "\ufdd1"
"""Two Unicode noncharacters. If a message contains the text of a special token, `prompt` puts them around this text, so
that it is encoded as plain text."""


@dataclass(frozen=True, slots=True)
class _Surroundings:
    """The tokens that a template writes around an observation of one role."""

    header: tuple[int, ...]
    """Ids of the text between a reply and an observation."""
    footer: tuple[int, ...]
    """Ids of the text between an observation and the next turn."""
    stripped: tuple[str | None, str | None]
    """Characters that the template strips from the start and the end of an observation; None means all whitespace."""
    removes_thoughts: bool
    """Whether the template removes reasoning from the turns before the observation."""

    def strip(self, observation: str) -> str:
        return observation.lstrip(self.stripped[0]).rstrip(self.stripped[1])


class TokenBridge:
    """Continues conversations of one tokenizer and chat template."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Derive from the chat template the text around an observation. Raises UserError if this is impossible."""
        self._tokenizer = tokenizer
        template = str(tokenizer.hf.get_chat_template())
        added = tokenizer.hf.added_tokens_decoder
        self._added = frozenset(added)
        special = {str(token) for token in added.values() if token.special}
        named = {str(token) for token in added.values() if _is_mark(str(token), template)}
        self._plain = _plain_tokenizer(tokenizer.hf, special | named)
        self._roles = {"user": self._derive("user")}
        if re.search(r"""['"]tool['"]""", template):
            with suppress(UserError):  # if the template requires calls as JSON objects, results are user messages
                self._roles["tool"] = self._derive("tool")
        around = {added[i] for role in self._roles.values() for i in (*role.header, *role.footer) if i in added}
        self._named = _any_of(special | named)
        self._markers = _any_of((special | set(map(str, around))) - _KEPT)
        self._hidden = {i for i, token in added.items() if token.special and str(token) not in _KEPT}
        self.tool_format = self._derive_tool_format()
        """How the template writes tools and tool calls; None if its format of tool calls is unknown."""

    @property
    def removes_thoughts(self) -> tuple[str, ...]:
        """Roles of observations for which the template removes reasoning from the turns before them."""
        return tuple(role for role, around in self._roles.items() if around.removes_thoughts)

    def role(self, tool: str | None) -> str:
        """Return the role of an observation: "tool" for the result of a tool, if the template can render it."""
        return "tool" if tool is not None and "tool" in self._roles else "user"

    def text(self, token_ids: Sequence[int]) -> str:
        """Return the text of a turn, without special tokens except the tags of reasoning and of tool calls."""
        return self._tokenizer.text([i for i in token_ids if i not in self._hidden], keep_special=True)

    def cut(self, observation: str, max_tokens: int) -> str:
        """Cut an observation to at most `max_tokens`, and remove lone surrogates."""
        text, limit = _clean(observation), max_tokens
        while len(ids := self._plain_ids(text)) > max_tokens:
            text = self._plain.decode(ids[:limit], skip_special_tokens=False).rstrip("\ufffd")  # a cut character
            limit -= 1
        return text

    def begins_path(self, turns: Iterable[str], role: str) -> bool:
        """Return whether an observation of this role begins a new path, because the template changes earlier turns."""
        return self._roles[role].removes_thoughts and any(_CLOSE_THOUGHT in turn for turn in turns)

    def suffix(self, turn_ids: Sequence[int], observation: Message) -> tuple[int, ...]:
        """Return the ids to append after a turn, in this order: the ids that end a turn, without those that `turn_ids`
        already contains; the ids of the observation; the ids that start the next turn."""
        around = self._roles[observation.role]
        header = around.header[self._overlap(turn_ids, around.header) :]
        return (*header, *self._plain_ids(around.strip(_clean(observation.content))), *around.footer)

    def prompt(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> tuple[int, ...]:
        """Return the ids of a history and of the schemas of tools. If messages or schemas contain the text of special
        tokens, this text is encoded as plain text. Without such text, the ids equal the result of
        `Tokenizer.prompt_ids`."""
        marked = [Message(m.role, self._marked(m)) for m in messages]
        rendered = self._text(marked, tools=self._marked_values(list(tools)))
        ids: list[int] = []
        is_text = False
        for part in re.split(f"([{_BEGIN_TEXT}{_END_TEXT}])", rendered):
            if part in (_BEGIN_TEXT, _END_TEXT):
                is_text = part == _BEGIN_TEXT
            else:
                ids += self._plain_ids(part) if is_text else self._tokenizer.ids(part)
        return tuple(ids)

    def _overlap(self, turn_ids: Sequence[int], header: Sequence[int]) -> int:
        """Return how many ids of `header` the turn already contains. This is the length of the longest start of
        `header` that consists of added tokens and is the end of `turn_ids`."""
        num = next((n for n, token_id in enumerate(header) if token_id not in self._added), len(header))
        return next((n for n in range(num, 0, -1) if tuple(turn_ids[-n:]) == tuple(header[:n])), 0)

    def _plain_ids(self, text: str) -> tuple[int, ...]:
        return tuple(self._plain.encode(text, add_special_tokens=False).ids)

    def _marked(self, message: Message) -> str:
        """Return the text of a message with its special tokens marked. A turn keeps its tags, such as <tool_call>."""
        pattern = self._markers if message.role == "assistant" else self._named
        return pattern.sub(rf"{_BEGIN_TEXT}\g<0>{_END_TEXT}", _clean(message.content))

    def _marked_values(self, value: Any) -> Any:
        """Return a JSON value whose strings have `_BEGIN_TEXT` and `_END_TEXT` around special tokens."""
        if isinstance(value, list):
            return [self._marked_values(one) for one in value]
        if isinstance(value, dict):
            return {key: self._marked_values(one) for key, one in value.items()}
        return self._marked(Message("tool", value)) if isinstance(value, str) else value

    # ---- derivation --------------------------------------------------------------------------------------------------

    def _derive(self, role: str) -> _Surroundings:
        """Find the text between a reply and an observation, and the text between an observation and the next turn."""
        user, reply, observation = Message("user", _USER), Message("assistant", _REPLY), Message(role, _OBSERVATION)
        start = self._text((user,))
        two = self._text((user, reply, observation))
        more = self._text((user, reply, observation, reply, observation))
        before, found, rest = two.partition(_REPLY)
        header, also_found, footer = rest.partition(_OBSERVATION)
        if not found or not also_found or _REPLY in rest or not header or not footer:
            raise self._refused("a rendered conversation does not contain each message once, with text around it")
        opening = two.removesuffix(footer)
        between = more.removeprefix(opening).removesuffix(_REPLY + header + _OBSERVATION + footer)
        if more != opening + between + _REPLY + header + _OBSERVATION + footer:
            raise self._refused("the text around a message depends on its place in the conversation")
        if not _opens(start, before) or not _opens(footer, between):
            raise self._refused("the text before a reply is not the generation prompt")
        header_ids, footer_ids = tuple(self._tokenizer.ids(header)), tuple(self._tokenizer.ids(footer))
        text = self._tokenizer.text((*header_ids, *self._plain_ids(_OBSERVATION), *footer_ids), keep_special=True)
        if _OBSERVATION not in text or text.split() != (header + _OBSERVATION + footer).split():
            raise self._refused("its tokenizer changes text that is encoded in parts")
        return _Surroundings(
            header_ids, footer_ids, self._stripped(role, opening, footer), self._removes_thoughts(role)
        )

    def _stripped(self, role: str, opening: str, footer: str) -> tuple[str | None, str | None]:
        user, reply = Message("user", _USER), Message("assistant", _REPLY)
        text = self._text((user, reply, Message(role, f"\n {_OBSERVATION} \n")))
        for left, right in product(("", "\n", None), repeat=2):
            kept = ("\n " + _OBSERVATION).lstrip(left), " \n".rstrip(right)
            if text == opening.removesuffix(_OBSERVATION) + "".join(kept) + footer:
                return left, right
        raise self._refused("it changes the whitespace around messages")

    def _removes_thoughts(self, role: str) -> bool:
        thought = f"{_OPEN_THOUGHT}\n{_THOUGHT}\n{_CLOSE_THOUGHT}\n\n{_REPLY}"
        messages = (Message("user", _USER), Message("assistant", thought), Message(role, _OBSERVATION))
        return _THOUGHT not in self._text(messages)

    def _derive_tool_format(self) -> ToolFormat | None:
        """Find the tool family (`tools.py`) that reads this template's calls, and whether the template renders
        schemas."""
        call = ToolCall(_TOOL, {"text": "a b", "number": 7})
        function = {"name": call.name, "arguments": call.arguments}
        calls = [{"id": "quokka777", "type": "function", "function": function}]
        parameters = {"type": "object", "properties": {"text": {"type": "string", "description": "A text."}}}
        schema = {"name": _TOOL, "description": "A tool.", "parameters": parameters}
        tools = [{"type": "function", "function": schema}]
        user = {"role": "user", "content": _USER}
        try:
            asked, plain = (self._render([user], is_open=True, tools=given) for given in (tools, []))
            shown = self._render(
                [user, {"role": "assistant", "content": "", "tool_calls": calls}], is_open=False, tools=tools
            )
        except UserError:
            return None
        turn = shown.removeprefix(asked) if shown.startswith(asked) else shown.rpartition(_USER)[2]
        turn = self.text(self._tokenizer.ids(turn))
        family = next((family for family in FAMILIES if tool_calls(turn, family) == [call]), None)
        is_rendered = _TOOL in asked and asked.rpartition(_USER)[2] == plain.rpartition(_USER)[2]
        return None if family is None else ToolFormat(family, is_rendered)

    def _text(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> str:
        chat = [{"role": m.role, "content": m.content} for m in messages]
        return self._render(chat, is_open=True, tools=tools)

    def _render(self, chat: Sequence[dict[str, Any]], *, is_open: bool, tools: Sequence[Any]) -> str:
        render = self._tokenizer.hf.apply_chat_template
        try:
            return str(render(list(chat), tools=list(tools) or None, add_generation_prompt=is_open, tokenize=False))
        except Exception as error:  # a template is a program and may raise any exception
            roles = ", ".join(m["role"] for m in chat)
            raise self._refused(f"it cannot render {roles}: {first_line(error)}") from error

    def _refused(self, why: str) -> UserError:
        return UserError(
            f"the chat template of {getattr(self._tokenizer.hf, 'name_or_path', '') or 'the tokenizer'} cannot be used "
            f"for multi-turn tasks: {why}; use a model or a chat_template.jinja that renders turns one after another"
        )


def _is_mark(token: str, template: str) -> bool:
    """Return whether an added token is a mark: a token that has a form such as <think> or <|file_sep|>, or that the
    template contains."""
    is_in_form = re.fullmatch(r"<[|｜].+[|｜]>|</?(think|tool_call|tool_response)>", token) is not None
    return bool(token.strip()) and (is_in_form or token in template)


def _opens(prompt: str, shown: str) -> bool:
    """Return whether a generation prompt equals the text that the template writes before a reply in the history. Tags
    of reasoning may differ."""
    num_equal = next((n for n, (a, b) in enumerate(zip(prompt, shown, strict=False)) if a != b), len(shown))
    return _THOUGHT_TAGS.fullmatch(prompt[num_equal:]) is not None


def _clean(text: str) -> str:
    """Replace lone surrogates, which cannot be encoded, and the marks `_BEGIN_TEXT` and `_END_TEXT`."""
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return re.sub(f"[{_BEGIN_TEXT}{_END_TEXT}]", "\ufffd", text)


def _any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or "(?!)")


def _plain_tokenizer(hf: Any, as_text: Collection[str]) -> Any:
    """Return a copy of a fast tokenizer that encodes the tokens in `as_text` as plain text."""
    from tokenizers import Tokenizer as FastTokenizer

    if not getattr(hf, "is_fast", False):
        raise UserError("multi-turn tasks need a fast tokenizer (tokenizer.json), and this model has none")
    parts = json.loads(hf.backend_tokenizer.to_str())
    for token in parts["added_tokens"]:
        token["special"] = token["content"] in as_text
    copy = FastTokenizer.from_str(json.dumps(parts))
    copy.encode_special_tokens = True
    copy.no_truncation()
    copy.no_padding()
    return copy

"""The token bridge: continues a conversation by ids, without rendering the chat template again.

    prompt ids ─▶ sampled ids of a turn ─▶ suffix ids: end of the turn, observation, start of the next turn ─▶ …

Rendering a whole conversation again and tokenising it changes the ids of earlier turns (BPE merges, whitespace, JSON
rewritten by the template), so the logprobs of sampled tokens would no longer belong to the ids that are trained. The
bridge only appends. It derives the text around an observation from the template, once, when the run starts.

A template that removes earlier reasoning from the history cannot be continued by appending. For such a turn the history
is rendered again, and a new path of the episode begins with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from baton.errors import UserError, first_line
from baton.policy.tokenizer import Tokenizer
from baton.types import Message

_USER, _REPLY, _THOUGHT, _OBSERVATION = "Quokka7user", "Quokka7reply", "Quokka7thought", "Quokka7observation"
"""Texts that no template contains, so that their positions in a rendered conversation are known."""
_OPEN_THOUGHT, _CLOSE_THOUGHT = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class Continuation:
    """The ids that follow a turn."""

    token_ids: tuple[int, ...]
    """Ids to append; with `is_new_path` the whole prompt of the new path."""
    is_cut: bool
    """Whether the observation was longer than allowed and lost its end."""
    is_new_path: bool = False


class TokenBridge:
    """Continues conversations of one tokenizer and chat template."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Derive the text around an observation. Raises UserError for a template that does not allow it."""
        self._tokenizer = tokenizer
        self._plain = _without_special_tokens(tokenizer.hf)
        header, footer = self._derive()
        self._header = tuple(tokenizer.ids(header))
        self._footer = tuple(tokenizer.ids(footer))
        self.removes_thoughts = self._removes_thoughts()
        """Whether the template removes reasoning from earlier turns."""

    def continuation(
        self,
        history: Sequence[Message],
        last_id: int,
        observation: str,
        *,
        max_observation_tokens: int,
    ) -> Continuation:
        """Return what follows a turn.

        history: the conversation so far, the turn included. last_id: the last id of the turn; if it is not the
        template's end of a turn, the end is appended. Special tokens in the observation are encoded as text.
        """
        ids = self._plain_ids(observation)
        is_cut = len(ids) > max_observation_tokens
        ids = ids[:max_observation_tokens]
        if self.removes_thoughts and _CLOSE_THOUGHT in history[-1].content:
            if is_cut:
                observation = self._tokenizer.text(ids, keep_special=True)
            return Continuation(self._rendered(history, observation), is_cut, is_new_path=True)
        header = self._header[1:] if last_id == self._header[0] else self._header
        return Continuation((*header, *ids, *self._footer), is_cut)

    def _rendered(self, history: Sequence[Message], observation: str) -> tuple[int, ...]:
        """Render a history with plain text in place of the observation, which is encoded without special tokens."""
        ids = self._tokenizer.prompt_ids((*history, Message("user", _OBSERVATION)))
        text = self._tokenizer.text(ids, keep_special=True)
        before, _, after = text.rpartition(_OBSERVATION)
        return (*self._tokenizer.ids(before), *self._plain_ids(observation), *self._tokenizer.ids(after))

    def _plain_ids(self, text: str) -> tuple[int, ...]:
        return tuple(self._plain.encode(text, add_special_tokens=False).ids)

    def text(self, token_ids: Sequence[int]) -> str:
        """Return the text of a turn, without special tokens."""
        return self._tokenizer.text(token_ids)

    # ---- derivation --------------------------------------------------------------------------------------------------

    def _derive(self) -> tuple[str, str]:
        """Return the text between a reply and an observation, and that between an observation and the next turn."""
        user, reply, observation = Message("user", _USER), Message("assistant", _REPLY), Message("user", _OBSERVATION)
        one = self._text((user, reply), is_open=False)
        two = self._text((user, reply, observation), is_open=True)
        more = self._text((user, reply, observation, reply, observation), is_open=True)
        start = self._text((user,), is_open=True)
        before, found, rest = two.partition(_REPLY)
        header, also_found, footer = rest.partition(_OBSERVATION)
        if not found or not also_found or _REPLY in rest or not header or not footer:
            raise self._refused("a rendered conversation does not contain each message once, with text around it")
        if not one.startswith(before + _REPLY) or not before.startswith(start.rstrip()):
            raise self._refused("the text before a reply depends on the messages after it")
        if not more.startswith(two.removesuffix(footer) + footer.rstrip()) or not more.endswith(
            header + _OBSERVATION + footer
        ):
            raise self._refused("the text around a message depends on its place in the conversation")
        return header, footer

    def _removes_thoughts(self) -> bool:
        thought = f"{_OPEN_THOUGHT}\n{_THOUGHT}\n{_CLOSE_THOUGHT}\n\n{_REPLY}"
        messages = (Message("user", _USER), Message("assistant", thought), Message("user", _OBSERVATION))
        return _THOUGHT not in self._text(messages, is_open=True)

    def _text(self, messages: Sequence[Message], *, is_open: bool) -> str:
        chat = [{"role": m.role, "content": m.content} for m in messages]
        try:
            return str(self._tokenizer.hf.apply_chat_template(chat, add_generation_prompt=is_open, tokenize=False))
        except Exception as error:  # templates are programs and raise what they like
            raise self._refused(f"it cannot render user, assistant, user: {first_line(error)}") from error

    def _refused(self, why: str) -> UserError:
        return UserError(
            f"the chat template of {getattr(self._tokenizer.hf, 'name_or_path', '') or 'the tokenizer'} cannot be used "
            f"for multi-turn tasks: {why}; use a model or a chat_template.jinja that renders turns one after another"
        )


def _without_special_tokens(hf: Any) -> Any:
    """Return a copy of a fast tokenizer that encodes the text of special tokens as text."""
    from tokenizers import Tokenizer as FastTokenizer

    if not getattr(hf, "is_fast", False):
        raise UserError("multi-turn tasks need a fast tokenizer (tokenizer.json), and this model has none")
    copy = FastTokenizer.from_str(hf.backend_tokenizer.to_str())
    copy.encode_special_tokens = True
    copy.no_truncation()
    copy.no_padding()
    return copy

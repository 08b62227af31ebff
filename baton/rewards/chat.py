"""Requests to a generative reward model through an OpenAI-compatible API, and the numbers parsed from its replies."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from baton.rewards.functions import malformed, number
from baton.rewards.patterns import DEADLINE_S, last_match
from baton.rewards.scorer_protocol import Call, CallFailure, Outcome
from baton.rewards.settings import ANY_NUMBER
from baton.types import FailureCause

SHORT_TOKENS = 4
"""If `max_new_tokens` is not above this, replies that were cut are used: the template asks for a number alone."""


class ChatFormat(msgspec.Struct, frozen=True):
    """How to call a generative reward model through an OpenAI-compatible API; the fields are keys of a [[reward]]."""

    model: str
    template: str
    pattern: str
    max_new_tokens: int

    def request(self, call: Call) -> dict[str, Any]:
        values = {
            "prompt": "\n\n".join(message.content for message in call.prompt.messages),
            "response": call.response,
            "reference": call.prompt.answer or "",
        }
        text = re.sub(r"\{(prompt|response|reference)\}", lambda found: values[found[1]], self.template)
        sampling = {"temperature": 0, "max_tokens": self.max_new_tokens}
        return {"model": self.model, "messages": [{"role": "user", "content": text}], **sampling}

    def outcome(self, reply: Any) -> Outcome:
        try:
            choice = reply["choices"][0]
            text, is_cut = str(choice["message"]["content"]), choice.get("finish_reason") == "length"
        except (KeyError, IndexError, TypeError, AttributeError):
            return malformed(reply, "has no choices[0].message.content")
        shown = text if len(text) <= 80 else f"…{text[-80:]}"
        try:
            match = last_match(self.pattern, text)
        except TimeoutError:
            late = f"took more than {DEADLINE_S:.0f} s of CPU time"
            return CallFailure(FailureCause.MALFORMED, f"replied {shown!r}; the search for {self.pattern!r} {late}")
        # if a reply was cut, the number may be a part of the rating, or belong to the reasoning before the rating
        is_unsure = match is None or self.pattern == ANY_NUMBER or text.rstrip().endswith(match[0])
        if is_cut and is_unsure and self.max_new_tokens > SHORT_TOKENS:
            most = f"max_new_tokens = {self.max_new_tokens}"
            return CallFailure(FailureCause.MALFORMED, f"replied {shown!r}, which was cut at {most}: raise it")
        try:
            return number(float((match[1][0] if match else None) or ""))
        except ValueError:
            return CallFailure(FailureCause.MALFORMED, f"replied {shown!r}, in which {self.pattern!r} finds no number")

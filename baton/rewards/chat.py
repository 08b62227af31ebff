"""Calls of a generative reward model through the API of OpenAI: a template becomes the request, a number is parsed from
the reply."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from baton.rewards.functions import malformed, number
from baton.rewards.scorer_protocol import Call, CallFailure, Outcome
from baton.types import FailureCause


class ChatFormat(msgspec.Struct, frozen=True):
    """How a generative reward model behind an OpenAI API is called; the fields are keys of a [[reward]]."""

    model: str
    template: str
    pattern: str

    def request(self, call: Call) -> dict[str, Any]:
        values = {
            "prompt": "\n\n".join(message.content for message in call.prompt.messages),
            "response": call.response,
            "reference": call.prompt.answer or "",
        }
        text = re.sub(r"\{(prompt|response|reference)\}", lambda found: values[found[1]], self.template)
        return {"model": self.model, "messages": [{"role": "user", "content": text}], "temperature": 0}

    def outcome(self, reply: Any) -> Outcome:
        try:
            text = str(reply["choices"][0]["message"]["content"])
        except (KeyError, IndexError, TypeError):
            return malformed(reply, "has no choices[0].message.content")
        matches = list(re.finditer(self.pattern, text))
        try:
            return number(float(matches[-1][1]))
        except (IndexError, TypeError, ValueError):
            shown = text if len(text) <= 80 else f"…{text[-80:]}"
            return CallFailure(FailureCause.MALFORMED, f"replied {shown!r}, in which {self.pattern!r} finds no number")

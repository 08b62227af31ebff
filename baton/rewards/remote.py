"""Remote reward scorers: a reward model, a sandbox that runs code, or any other server that returns a number as JSON.

POST {"task", "messages", "response", "answer", "reference", "metadata"}  ──▶  0.5, {"reward": 0.5} or {"score": 0.5}

For a multi-turn episode, the request also has the keys "turns" (turns and observations, as messages) and "turn_rewards"
(the environment's reward of each turn).
"""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import msgspec

from baton.rewards.chat import ChatFormat
from baton.rewards.functions import malformed, number
from baton.rewards.scorer_protocol import Call, CallFailure, Outcome
from baton.types import FailureCause

MAX_REPLY_BYTES = 2**22
BUSY = frozenset({408, 425, 429})
"""HTTP status codes after which the call is repeated, in addition to all codes ≥ 500."""


async def call_remote_scorer(
    session: aiohttp.ClientSession, url: str, call: Call, deadline_s: float | None, chat: ChatFormat | None
) -> Outcome:
    """Call a remote scorer once. A failure of the server or the connection is returned as an outcome, not raised.
    `deadline_s`: maximum duration in seconds; None if the caller enforces a limit."""
    prompt = call.prompt
    request: dict[str, Any] = {
        "task": prompt.task,
        "messages": prompt.messages,
        "response": call.response,
        "answer": call.answer,
        "reference": prompt.answer,
        "metadata": prompt.metadata,
    }
    if call.episode is not None:
        request |= {"turns": call.turns, "turn_rewards": [one.reward for one in call.episode.exchanges]}
    if chat is not None:
        request = chat.request(call)
    try:
        async with (
            asyncio.timeout(deadline_s),
            session.post(url, data=msgspec.json.encode(request), headers={"Content-Type": "application/json"}) as reply,
        ):
            body, status = bytearray(), reply.status
            async for piece in reply.content.iter_chunked(2**16):
                body += piece
                if len(body) > MAX_REPLY_BYTES:
                    return CallFailure(FailureCause.MALFORMED, f"answered with more than {MAX_REPLY_BYTES:,} bytes")
    except TimeoutError:
        within = "in time" if deadline_s is None else f"within {deadline_s:g} s"
        return CallFailure(FailureCause.TIMEOUT, f"gave no answer {within}")
    except aiohttp.ClientResponseError as error:
        return CallFailure(FailureCause.MALFORMED, f"sent no valid HTTP response: {error.message}")
    except (aiohttp.ClientError, OSError) as error:
        return CallFailure(FailureCause.UNREACHABLE, f"cannot be reached: {error or type(error).__name__}")
    shown = body[:80].decode(errors="replace")
    if status >= 500 or status in BUSY:
        return CallFailure(FailureCause.UNREACHABLE, f"answered with status {status}: {shown!r}")
    if status >= 300:
        return CallFailure(FailureCause.RAISED, f"refused with status {status}: {shown!r}")
    try:
        answer = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return CallFailure(FailureCause.MALFORMED, f"answered {shown!r}, which is not JSON")
    if chat is not None:
        return chat.outcome(answer)
    if isinstance(answer, dict):
        key = next((k for k in ("reward", "score") if k in answer), None)
        if key is None:
            return malformed(answer, "has neither 'reward' nor 'score'")
        answer = answer[key]
    return number(answer)

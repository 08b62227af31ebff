"""Judges behind a URL: a reward model, a sandbox that runs code, anything that takes JSON and gives a number.

POST {"task", "messages", "response", "answer", "reference", "metadata"}  ──▶  0.5, {"reward": 0.5} or {"score": 0.5}
"""

from __future__ import annotations

import asyncio

import aiohttp
import msgspec

from baton.rewards.functions import malformed, number
from baton.rewards.scorer_protocol import Call, CallFailure, Outcome
from baton.types import FailureCause

BUSY = frozenset({408, 425, 429})
"""Statuses below 500 that ask to come again."""


async def ask_remote(session: aiohttp.ClientSession, url: str, call: Call, deadline_s: float) -> Outcome:
    """Make one call. Whatever the other side does comes back as an outcome."""
    prompt = call.prompt
    question = {
        "task": prompt.task,
        "messages": prompt.messages,
        "response": call.response,
        "answer": call.answer,
        "reference": prompt.answer,
        "metadata": prompt.metadata,
    }
    try:
        async with (
            asyncio.timeout(deadline_s),
            session.post(
                url, data=msgspec.json.encode(question), headers={"Content-Type": "application/json"}
            ) as reply,
        ):
            body = await reply.read()
            status = reply.status
    except TimeoutError:
        return CallFailure(FailureCause.TIMEOUT, f"gave no answer within {deadline_s:g} s")
    except aiohttp.ClientResponseError as error:
        return CallFailure(FailureCause.MALFORMED, f"does not speak HTTP: {error.message}")
    except (aiohttp.ClientError, OSError) as error:
        return CallFailure(FailureCause.UNREACHABLE, f"cannot be reached: {error or type(error).__name__}")
    shown = body[:80].decode(errors="replace")
    if status >= 500 or status in BUSY:
        return CallFailure(FailureCause.UNREACHABLE, f"answered with status {status}: {shown!r}")
    if status >= 300:
        return CallFailure(FailureCause.RAISED, f"refused with status {status}: {shown!r}")
    try:
        said = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return CallFailure(FailureCause.MALFORMED, f"answered {shown!r}, which is no JSON")
    if isinstance(said, dict):
        key = next((k for k in ("reward", "score") if k in said), None)
        if key is None:
            return malformed(said, "has neither 'reward' nor 'score'")
        said = said[key]
    return number(said)

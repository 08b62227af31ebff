"""The HTTP messages of an SGLang server: request bodies, responses, and the events of its streams.

Sources: SGLang's documentation and code (`managers/io_struct.py`, `entrypoints/http_server.py`,
`managers/tokenizer_manager.py`). An event of a `/generate` stream is a line `data: {...}`; the last line is
`data: [DONE]`:

    {"output_ids": [...], "meta_info": {"id": rid, "completion_tokens": n, "weight_version": "...",
     "output_token_logprobs": [[logprob, id, text or null], ...],
     "finish_reason": null | {"type": "stop" | "length" | "abort", "message": ...}}}

By default every event contains all tokens generated so far. A server in incremental mode sends only new tokens, except
when a waiting request is aborted: the server then sends all tokens again.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import StreamReader

from baton.errors import EngineFault
from baton.rollout.engines.client import EngineRequest, GeneratedTokens


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """The properties of a server that the client needs."""

    is_incremental: bool = False
    """Whether the events of a stream contain only new tokens."""
    context_length: int | None = None
    """Maximum tokens of prompt and response together; None if the server does not report it."""
    tp: int | None = None
    """Number of tensor-parallel GPUs; None if the server does not report it."""
    pp: int | None = None
    """Number of pipeline stages; None if the server does not report it."""


class _MetaInfo(msgspec.Struct):
    completion_tokens: int
    output_token_logprobs: list[tuple[float, int, str | None]] = []
    finish_reason: dict[str, Any] | None = None
    weight_version: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0


class _Event(msgspec.Struct):
    meta_info: _MetaInfo | None = None
    error: dict[str, Any] | None = None


SERVER_INFO = ("/server_info", "/get_server_info")
MODEL_INFO = ("/model_info", "/get_model_info")
LOADS = ("/v1/loads?include=core", "/get_load")
"""Paths at which SGLang reports the server's load, in newer and in older versions."""
_EVENT = msgspec.json.Decoder(_Event)


def generate_body(request: EngineRequest) -> dict[str, Any]:
    """Return the body of a `/generate` request that sends ids and receives a stream of ids and logprobs."""
    return {
        "rid": request.key,
        "input_ids": list(request.token_ids),
        "sampling_params": {
            "max_new_tokens": request.max_tokens,
            "temperature": request.sampling.temperature,
            "stop_token_ids": list(request.stop_token_ids),
            "skip_special_tokens": False,
        },
        "return_logprob": True,
        "logprob_start_len": -1,  # do not compute logprobs of the prompt
        "stream": True,
    }


def abort_body(rid: str | None) -> dict[str, Any]:
    """Return the body of `/abort_request` for one request, or for all requests if `rid` is None."""
    return {"rid": rid or "", "abort_all": rid is None}


def read_server(info: Any) -> ServerInfo:
    """Parse the response of `/server_info`. Raises EngineFault if the response is not a JSON object."""
    if not isinstance(info, dict):
        raise EngineFault(f"an SGLang server sent {str(info)[:100]!r} as /server_info, expected a JSON object")
    length, tp, pp = (
        value if isinstance(value := info.get(name), int) else None for name in ("context_length", "tp_size", "pp_size")
    )
    is_incremental = bool(info.get("incremental_streaming_output") or info.get("stream_output"))
    return ServerInfo(is_incremental, length, tp, pp)


def load_of(answer: Any) -> int:
    """Return the number of requests in the server from a response of `LOADS`. Raises EngineFault for a malformed
    response."""
    if isinstance(answer, dict) and "loads" in answer:
        answer = answer["loads"]
    parts = answer if isinstance(answer, list) else [answer]
    if not parts or not all(isinstance(part, dict) for part in parts):
        raise EngineFault(f"an SGLang server sent {str(answer)[:100]!r} as its load, expected JSON objects")
    return sum(_requests(part) for part in parts)


def _requests(part: dict[str, Any]) -> int:
    total = part.get("num_total_reqs", part.get("num_reqs"))
    counts = [total] if total is not None else [part.get("num_running_reqs"), part.get("num_waiting_reqs")]
    known = [count for count in counts if isinstance(count, int)]
    if len(known) < len(counts):
        raise EngineFault(f"an SGLang server sent {str(part)[:100]!r} as its load, which has no number of requests")
    return sum(known)


async def read_json(stream: StreamReader, longest: int) -> Any:
    """Read a JSON response. Raises ValueError if the response has more than `longest` bytes or is not JSON."""
    found = bytearray()
    async for piece in stream.iter_any():
        found += piece
        if len(found) > longest:
            raise ValueError(f"the response has more than {longest} bytes")
    try:
        return msgspec.json.decode(found) if found.strip() else None
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"the response is not JSON: {error}") from error


async def events(key: str, stream: StreamReader, longest: int, is_incremental: bool) -> AsyncIterator[GeneratedTokens]:
    """Yield the new tokens of each event. Raises ValueError if an event is too long, is malformed or reports an
    error."""
    known = 0
    async for line in _lines(stream, longest):
        if not line.startswith(b"data:"):
            continue
        text = line[5:].strip()
        if text == b"[DONE]":
            return
        said = _EVENT.decode(text)
        if said.meta_info is None:
            raise ValueError(f"the server reports the error {said.error}")
        grown = _read(key, said.meta_info, known, is_incremental=is_incremental)
        known += len(grown.token_ids)
        yield grown


def _read(key: str, meta: _MetaInfo, known: int, *, is_incremental: bool) -> GeneratedTokens:
    entries = meta.output_token_logprobs
    has_all = not is_incremental or len(entries) == meta.completion_tokens
    new = entries[known:] if has_all else entries
    if has_all and len(entries) < known:
        raise ValueError(f"the stream has returned {known} tokens before and now contains only {len(entries)}")
    prefilled = 0 if known else max(0, meta.prompt_tokens - meta.cached_tokens)
    finish = None if meta.finish_reason is None else str(meta.finish_reason.get("type"))
    ids, logprobs = tuple(token for _, token, _ in new), tuple(logprob for logprob, _, _ in new)
    return GeneratedTokens(key, ids, logprobs, finish, prefilled if new else 0, meta.weight_version)


async def _lines(stream: StreamReader, longest: int) -> AsyncIterator[bytes]:
    rest = b""
    async for piece in stream.iter_any():
        *lines, rest = (rest + piece).split(b"\n")
        if len(rest) > longest or any(len(line) > longest for line in lines):
            raise ValueError(f"an event of the stream has more than {longest} bytes")
        for line in lines:
            yield line

"""Asks running SGLang servers for their properties before a run uses them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import aiohttp

from baton.errors import EngineFault
from baton.rollout.engines.sglang import wire

_LONGEST_ANSWER = 1 << 20


def ask_servers(urls: Sequence[str], *, key: str | None, timeout_s: float) -> list[wire.ServerInfo | str]:
    """Return the properties of each server, or why the server did not report them within `timeout_s`. `key`: API
    key."""
    return asyncio.run(_ask_all(urls, key, timeout_s))


async def _ask_all(urls: Sequence[str], key: str | None, timeout_s: float) -> list[wire.ServerInfo | str]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=timeout_s)) as session:
        return await asyncio.gather(*(_ask(session, url.rstrip("/"), timeout_s) for url in urls))


async def _ask(session: aiohttp.ClientSession, url: str, timeout_s: float) -> wire.ServerInfo | str:
    status = 0
    try:
        for path in wire.SERVER_INFO:
            async with session.get(url + path, allow_redirects=False) as answer:
                status = answer.status
                if status == 200:
                    return wire.read_server(await wire.read_json(answer.content, _LONGEST_ANSWER))
    except TimeoutError:
        return f"no answer in {timeout_s:.0f} s"
    except (aiohttp.ClientError, EngineFault, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return f"HTTP {status}"

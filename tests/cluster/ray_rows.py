"""Rows as `ray.nodes()` gives them."""

from __future__ import annotations

from typing import Any


def row(host: str = "vm", *, node: str | None = None, labels: dict[str, str] | None = None, **amounts: Any) -> Any:
    """A node that is alive; resources by name, with `__` for `:`."""
    return {
        "NodeID": (node or host).encode().hex().ljust(56, "0"),
        "Alive": True,
        "NodeManagerAddress": "10.0.0.1",
        "NodeManagerHostname": host,
        "Resources": {key.replace("__", ":"): float(amount) for key, amount in amounts.items()},
        "Labels": labels or {},
    }

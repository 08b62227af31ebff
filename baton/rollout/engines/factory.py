"""Constructs the configured kind of engine. Only the package that this kind needs is imported."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args
from urllib.parse import urlsplit

from pydantic import ValidationError

from baton.errors import UserError
from baton.policy.settings import ModelSettings
from baton.rollout.engine import Engine, EngineKind, EngineSettings
from baton.types import PolicyVersion
from baton.weights.direct.settings import DirectTransfer

KINDS: tuple[EngineKind, ...] = get_args(EngineKind)


def engine_of_model(
    model: ModelSettings,
    settings: EngineSettings,
    version: PolicyVersion,
    *,
    direct: DirectTransfer | None = None,
    sleeps: bool = False,
) -> Engine:
    """Build an engine that serves a model as `version`.

    `direct`: how later versions are transferred from the trainer's memory to an engine of kind `vllm`. With None, later
    versions are transferred as files. `sleeps`: whether engine and trainer use the same devices alternately. Raises
    UserError if the engine does not support the model, or if a package is missing.
    """
    match settings.kind:
        case "embedded":
            from baton.rollout.engines.embedded.engine import embedded_engine

            return embedded_engine(model, settings, version)
        case "vllm":
            from baton.rollout.engines.vllm.engine import vllm_of_model

            return vllm_of_model(model, settings, version, direct=direct, sleeps=sleeps)
        case "sglang":
            from baton.rollout.engines.sglang.engine import sglang_of_model

            return sglang_of_model(model, settings, version)


def engine_from_skeleton(
    directory: Path,
    base: Mapping[str, Any] | None,
    settings: EngineSettings,
    *,
    device: str,
    attention: str,
    sleeps: bool = False,
) -> Engine:
    """Build an engine from a model's configuration and tokenizer. The engine serves no version until weights are
    loaded.

    `base`: tensors of the base model if versions are adapters, else None. The directory may be deleted after this call.
    `sleeps`: as in `engine_of_model`.
    Raises UserError if the engine does not support the model, or if a package is missing.
    """
    read_base = None if base is None else lambda: base
    match settings.kind:
        case "embedded":
            from baton.rollout.engines.embedded.engine import skeleton_engine

            return skeleton_engine(directory, base, settings, device=device, attention=attention)
        case "vllm":
            from baton.rollout.engines.vllm.engine import vllm_from_skeleton

            return vllm_from_skeleton(directory, read_base, settings, device=device, sleeps=sleeps)
        case "sglang":
            from baton.rollout.engines.sglang.engine import sglang_from_skeleton

            return sglang_from_skeleton(directory, read_base, settings)


def chosen(
    settings: EngineSettings, *, kind: str | None = None, slots: int | None = None, options: Sequence[str] = ()
) -> EngineSettings:
    """Return the engine settings of the run, with the overrides that the user of this machine has given. Raises
    UserError for an invalid override. `kind`: engine kind to use instead of the recipe's. `options`: strings
    `key=value`, such as `tensor_parallel=2`, for keys in the section of this engine kind."""
    kind = kind or settings.kind
    if kind not in KINDS:
        raise UserError(f"--engine: got {kind!r}, allowed are {', '.join(KINDS)}")
    values = settings.model_dump()
    values["kind"] = kind
    if slots is not None:
        values["slots"] = slots
    if kind != "embedded":
        values["processes"] = 0
    own = values.get(kind)
    for option in options:
        key, equals, value = option.partition("=")
        if own is None or key not in own or not equals:
            known = f"key=value with one of the keys {', '.join(own)}" if own else f"nothing: {kind} has no options"
            raise UserError(f"--engine-option: got {option!r}, allowed is {known}")
        own[key] = _decoded(value) if isinstance(own[key], dict) else value
    try:
        return EngineSettings.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(("engine", *map(str, first["loc"])))
        raise UserError(f"{where}: got {first['input']!r}: {first['msg']}") from error


def _decoded(text: str) -> Any:
    """Decode a value given as JSON; return the text itself if it is not JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def check_source(settings: EngineSettings, own: Collection[str]) -> None:
    """Raise UserError if settings from the hub contain the URL of an SGLang server on another machine, a directory or
    an environment variable of this machine, or arguments of vLLM. Such arguments can run code. `own`: keys that are not
    checked, because the user of this machine, or a run that this user started, has set them."""
    url, arguments = settings.sglang.url, settings.vllm.arguments
    if settings.kind == "sglang" and url is not None and "url" not in own:
        host = urlsplit(url).hostname
        if host not in ("127.0.0.1", "::1", "localhost"):
            raise UserError(
                f"engine.sglang.url: got {url} from the hub, but a worker connects only to a server on its own "
                f"machine; to allow this address, start the worker with --engine-option url={url}"
            )
    for key in ("weights_directory", "key_variable"):
        value = getattr(settings.sglang, key)
        if settings.kind == "sglang" and value is not None and key not in own:
            raise UserError(
                f"engine.sglang.{key}: got {value} from the hub, but only the user of this machine chooses where "
                "weights are written and which secret is sent; to allow it, start the worker with "
                f"--engine-option {key}={value}"
            )
    if settings.kind == "vllm" and arguments and "arguments" not in own:
        raise UserError(
            f"engine.vllm.arguments: got {', '.join(arguments)} from the hub, but such arguments can run code; to "
            f"allow them, start the worker with --engine-option 'arguments={json.dumps(arguments)}'"
        )

"""Reads the rows of a JSONL file, a parquet file or a Hugging Face dataset, with locations for error messages.

A dataset on the hub is read with the library `datasets`, so its cache, offline mode (HF_HUB_OFFLINE) and token
(HF_TOKEN, or `hf auth login`) apply. Without network, such a dataset is read from the cache of `datasets`, or from the
snapshot that `hf download --repo-type dataset` stored in the hub cache.
"""

from __future__ import annotations

import codecs
import importlib.util
import re
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from baton.errors import UserError, first_line

if TYPE_CHECKING:
    from datasets import Dataset, DatasetBuilder, DatasetDict

Row = dict[str, Any]
_HUB_NAME = re.compile(r"[\w.-]+/(?!.*\.(?:jsonl?|parquet)$)[\w.-]+(?:@[\w./-]+)?")


def read_rows(what: str, path: str, split: str = "train", config: str | None = None) -> list[tuple[str, Row]]:
    """Return (location, row) of every row. A location is `path, line 3` or `path, row 3`, counted from 1.

    `path`: a JSONL file, a parquet file, a directory written by `save_to_disk` of Hugging Face datasets, or the name of
    a dataset on the hub, with `@revision` if it is not the newest. Values are plain JSON values. Raises UserError,
    whose message begins with `what`, if the path cannot be read or has no rows, if a line is not a JSON object, or if
    the split or a package is missing.
    """
    source = Path(path)
    if is_hub_name(path):
        rows = list(_hub_rows(what, path, split, config))
    elif source.is_dir():
        rows = list(_dataset_rows(what, source, split))
    elif not source.is_file():
        raise UserError(f"{what}: there is no file {path!r} (relative to {Path.cwd()})")
    elif source.suffix == ".parquet":
        rows = list(_parquet_rows(what, source))
    else:
        rows = list(_json_rows(what, source))
    if not rows:
        raise UserError(f"{what}: {path} has no rows")
    return rows


def _json_rows(what: str, file: Path) -> Iterator[tuple[str, Row]]:
    # str.splitlines would also split at other line separators, which a JSON text may contain
    data = file.read_bytes().removeprefix(codecs.BOM_UTF8)
    if data.lstrip().startswith(b"["):
        raise UserError(f"{what}: {file} has a JSON array; allowed is JSONL, with one object per line")
    for number, line in enumerate(data.split(b"\n"), start=1):
        if line.strip():
            where = f"{file}, line {number}"
            try:
                row = msgspec.json.decode(line, type=Row)
                msgspec.msgpack.encode(row)  # refuse a row that the journal could not store
            except OverflowError as error:
                raise UserError(
                    f"{what}: {where} has an integer of more than 64 bits; write it as text, in quotation marks"
                ) from error
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                hint = "; allowed is JSONL (one object per line), or parquet in a file .parquet" if number == 1 else ""
                raise UserError(f"{what}: {where} is not a JSON object: {error}{hint}") from error
            yield where, row


def _parquet_rows(what: str, file: Path) -> Iterator[tuple[str, Row]]:
    _require(what, "pyarrow", file)
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    number = 0
    try:
        with ParquetFile(file) as table:
            for batch in table.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    where = f"{file}, row {number}"
                    yield where, _plain(what, where, row)
    except UnicodeDecodeError as error:
        raise UserError(f"{what}: {file}, row {number + 1} or later, has text that is not UTF-8: {error}") from error
    except (ArrowException, OSError) as error:
        raise UserError(f"{what}: {file} is not a parquet file: {first_line(error)}") from error


def _dataset_rows(what: str, directory: Path, split: str) -> Iterator[tuple[str, Row]]:
    _require(what, "datasets", directory)
    from datasets import load_from_disk

    try:
        found = load_from_disk(str(directory))
    except (FileNotFoundError, ValueError, KeyError) as error:
        raise UserError(
            f"{what}: {directory} is a directory, but was not written by save_to_disk of Hugging Face datasets: "
            f"{first_line(error)}"
        ) from error
    yield from _rows_of(what, str(directory), found, split)


def _rows_of(what: str, path: str, found: Dataset | DatasetDict, split: str) -> Iterator[tuple[str, Row]]:
    if isinstance(found, dict):
        if split == "auto":
            split = "test" if "test" in found or len(found) > 1 else next(iter(found))
        if split not in found:
            raise UserError(f"{what}: {path} has no split {split!r}; it has {', '.join(sorted(found))}: set split")
        found = found[split]
    try:
        for number, row in enumerate(found.with_format(None), start=1):
            where = f"{path}, row {number}"
            yield where, _plain(what, where, row)
    except ImportError as error:  # a package that decodes images or audio is missing
        raise UserError(f"{what}: {path} has a column that cannot be read: {error}; remove the column") from error


def is_hub_name(path: str) -> bool:
    """Return True if `path` names a dataset on the hub. It must have the form `owner/name` or `owner/name@revision`,
    and neither the path nor its parent directory may exist on this machine."""
    return bool(_HUB_NAME.fullmatch(path)) and not Path(path).exists() and not Path(path).parent.is_dir()


def hub_revision(what: str, path: str, config: str | None) -> str:
    """Return the commit of a dataset on the hub. Raises UserError if the dataset cannot be found."""
    return _hub_builder(what, path, config)[1]


def _hub_rows(what: str, path: str, split: str, config: str | None) -> Iterator[tuple[str, Row]]:
    builder, _ = _hub_builder(what, path, config)
    try:
        builder.download_and_prepare()
        found = builder.as_dataset()
    except Exception as error:  # errors of the network have no common base
        raise UserError(f"{what}: the dataset {path!r} could not be read: {first_line(error)}") from error
    yield from _rows_of(what, path, found, split)


def _hub_builder(what: str, path: str, config: str | None) -> tuple[DatasetBuilder, str]:
    """Open a dataset on the hub or in the cache without reading rows; return it with its commit."""
    _require(what, "datasets", Path(path))
    from datasets import load_dataset_builder
    from datasets.packaged_modules.cache.cache import Cache
    from huggingface_hub import snapshot_download

    name, _, revision = path.partition("@")
    errors: list[str] = []
    snapshot = None
    with suppress(OSError, ValueError):  # the hub cache may have no snapshot
        snapshot = snapshot_download(name, repo_type="dataset", revision=revision or None, local_files_only=True)
    for source in (name, snapshot) if snapshot else (name,):
        for chosen in (config,) if config else (None, "main"):  # GSM8K has two configurations and no default
            try:
                found = load_dataset_builder(source, chosen, revision=None if source == snapshot else revision or None)
            except Exception as error:  # noqa: BLE001 - errors of the network have no common base
                errors.append(" ".join(str(error).splitlines()[:2]))
                continue
            if source == snapshot:
                return found, Path(source).name
            if not isinstance(found, Cache) or found.hash == (revision or found.hash):
                return found, str(found.hash)
            errors.append(f"the cache has only the revision {found.hash}")
    about_config = [error for error in errors if "onfig" in error]
    raise UserError(
        f"{what}: {path!r} is neither a file nor a dataset that can be loaded from the Hugging Face hub or its cache: "
        f"{(about_config or errors)[0]}; check path and config, or run `hf download --repo-type dataset {name}`"
    )


def _plain(what: str, where: str, row: Row) -> Row:
    """Convert dates, decimals and bytes to text, so that a row can be stored and sent as JSON. Raises UserError for
    other values, such as images."""
    try:
        plain: Row = msgspec.to_builtins(row, str_keys=True, enc_hook=_time_as_text)
    except TypeError as error:
        raise UserError(
            f"{what}: {where} has a value that cannot be stored as JSON: {error}; remove its column"
        ) from error
    return plain


def _time_as_text(value: Any) -> str:
    """Convert pandas times, which pyarrow gives for nanoseconds, to text. msgspec converts only their base classes."""
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, timedelta):
        seconds: str = msgspec.to_builtins(timedelta(value.days, value.seconds, value.microseconds))
        return seconds
    raise TypeError(f"its type is {type(value).__name__}")


def _require(what: str, package: str, path: Path) -> None:
    if importlib.util.find_spec(package) is None:
        raise UserError(f"{what}: reading {path} needs {package}: run `pip install 'baton-rl[data]'`")

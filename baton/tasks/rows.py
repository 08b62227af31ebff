"""Rows of a file as plain objects, each with the place to name when something is wrong with it."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from baton.errors import UserError, first_line

Row = dict[str, Any]


def read_rows(what: str, path: str, split: str = "train") -> list[tuple[str, Row]]:
    """Return (`path, line 3` or `path, row 3`, row) of every row, counted from 1; columns hold plain JSON values.

    Reads JSONL, parquet, or a directory made by Hugging Face's `save_to_disk`. Raises UserError, beginning with `what`,
    for a path that is none of them, a line that is no JSON object, a missing split or package, or no rows at all.
    """
    place = Path(path)
    if place.is_dir():
        rows = list(_dataset_rows(what, place, split))
    elif not place.is_file():
        raise UserError(f"{what}: there is no file {path!r} (seen from {Path.cwd()})")
    elif place.suffix == ".parquet":
        rows = list(_parquet_rows(what, place))
    else:
        rows = list(_json_rows(what, place))
    if not rows:
        raise UserError(f"{what}: {path} has no rows")
    return rows


def _json_rows(what: str, file: Path) -> Iterator[tuple[str, Row]]:
    # bytes, so that only a newline ends a row: a JSON text may hold any other line separator as it is
    for number, line in enumerate(file.read_bytes().split(b"\n"), start=1):
        if line.strip():
            where = f"{file}, line {number}"
            try:
                yield where, msgspec.json.decode(line, type=Row)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise UserError(f"{what}: {where} is not a JSON object: {error}") from error


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
                    yield f"{file}, row {number}", _plain(row)
    except (ArrowException, OSError) as error:
        raise UserError(f"{what}: {file} is not a parquet file: {first_line(error)}") from error


def _dataset_rows(what: str, directory: Path, split: str) -> Iterator[tuple[str, Row]]:
    _require(what, "datasets", directory)
    from datasets import DatasetDict, load_from_disk

    try:
        found = load_from_disk(str(directory))
    except (FileNotFoundError, ValueError, KeyError) as error:
        raise UserError(
            f"{what}: {directory} is a directory, but not one that Hugging Face datasets wrote with save_to_disk: "
            f"{first_line(error)}"
        ) from error
    if isinstance(found, DatasetDict):
        if split not in found:
            raise UserError(f"{what}: {directory} has no split {split!r}; it has {', '.join(sorted(found))}")
        found = found[split]
    for number, row in enumerate(found.with_format(None), start=1):
        yield f"{directory}, row {number}", _plain(row)


def _plain(row: Row) -> Row:
    """Dates, decimals and bytes become texts, so that a row can be kept and sent as JSON."""
    plain: Row = msgspec.to_builtins(row, str_keys=True)
    return plain


def _require(what: str, package: str, path: Path) -> None:
    if importlib.util.find_spec(package) is None:
        raise UserError(f"{what}: reading {path} needs {package}: run `pip install 'baton-rl[data]'`")

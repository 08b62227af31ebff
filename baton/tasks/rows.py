"""Reads the rows of a JSONL file, a parquet file or a Hugging Face dataset, with locations for error messages."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from baton.errors import UserError, first_line

Row = dict[str, Any]


def read_rows(what: str, path: str, split: str = "train") -> list[tuple[str, Row]]:
    """Return (location, row) of every row. A location is `path, line 3` or `path, row 3`, counted from 1.

    path: a JSONL file, a parquet file, or a directory written by `save_to_disk` of Hugging Face datasets. Values are
    plain JSON values. Raises UserError if the path cannot be read or has no rows, if a line is not a JSON object, or if
    the split or a package is missing. The error message begins with `what`.
    """
    source = Path(path)
    if source.is_dir():
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
            f"{what}: {directory} is a directory, but was not written by save_to_disk of Hugging Face datasets: "
            f"{first_line(error)}"
        ) from error
    if isinstance(found, DatasetDict):
        if split not in found:
            raise UserError(f"{what}: {directory} has no split {split!r}; it has {', '.join(sorted(found))}")
        found = found[split]
    for number, row in enumerate(found.with_format(None), start=1):
        yield f"{directory}, row {number}", _plain(row)


def _plain(row: Row) -> Row:
    """Convert dates, decimals and bytes to text, so that a row can be stored and sent as JSON."""
    plain: Row = msgspec.to_builtins(row, str_keys=True)
    return plain


def _require(what: str, package: str, path: Path) -> None:
    if importlib.util.find_spec(package) is None:
        raise UserError(f"{what}: reading {path} needs {package}: run `pip install 'baton-rl[data]'`")

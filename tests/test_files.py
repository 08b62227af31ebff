"""Rows that a process died within are left out, others that cannot be read are named; sealed files are compared."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError

from baton.errors import Damaged, UserError
from baton.files import (
    append,
    atomic_directory,
    check_output,
    check_output_directory,
    read_rows,
    remove_leftovers,
    seal,
    verify,
    write_whole,
    writing,
)


def test_the_line_that_a_process_died_within_is_left_out_and_no_other(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    assert read_rows(file, dict[str, Any]) == []
    append(file, b'{"a":1}\n{"a":2}\n{"a":')
    assert read_rows(file, dict[str, Any]) == [{"a": 1}, {"a": 2}]
    append(file, b"3}\n" + bytes(30))  # a power cut may leave zeros where the size was written and the bytes were not
    assert [row["a"] for row in read_rows(file, dict[str, Any])] == [1, 2, 3]
    file.write_bytes(b'{"a":1}\n{"a"\xff2}\n{"a":3}\n')
    with pytest.raises(Damaged, match=r"rows.jsonl is damaged: line 2 of 3 cannot be read"):
        read_rows(file, dict[str, Any])


@pytest.mark.parametrize("size", [0, 1, 5, 99_999, 200_000])
def test_a_sealed_directory_tells_any_change_of_any_file(tmp_path: Path, size: int) -> None:
    file = tmp_path / "sub" / "data.bin"
    file.parent.mkdir()
    file.write_bytes(bytes(size))
    verify(tmp_path)  # not sealed: taken as it is
    seal(tmp_path)
    verify(tmp_path)
    (tmp_path / "added").write_text("another's")
    verify(tmp_path)
    file.write_bytes(bytes(size + 1))
    with pytest.raises(Damaged, match=rf"sub/data.bin has {size + 1} bytes instead of {size}"):
        verify(tmp_path)
    verify(tmp_path, lambda name: name != "sub/data.bin")
    file.unlink()
    with pytest.raises(Damaged, match=r"sub/data\.bin is missing"):
        verify(tmp_path)
    if size:
        file.write_bytes(bytes(size - 1) + b"\x01")
        with pytest.raises(Damaged, match=r"the content of sub/data\.bin does not match its digest"):
            verify(tmp_path)


def test_a_seal_needs_no_memory_of_the_size_of_its_files(tmp_path: Path) -> None:
    """ru_maxrss counts the pages of mapped files too."""
    size = 2**28
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(size)
    code = "import pathlib, resource, sys; from baton.files import seal, verify; "
    code += "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss; before = peak(); "
    code += "path = pathlib.Path(sys.argv[1]); seal(path); verify(path); print(peak() - before)"
    unit = 1 if sys.platform == "darwin" else 1024
    found = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, capture_output=True, timeout=120)
    assert int(found.stdout) * unit < size / 4


def test_a_directory_that_was_being_replaced_when_the_power_failed_comes_back(tmp_path: Path) -> None:
    with atomic_directory(tmp_path / "thing") as directory:
        (directory / "one").write_text("1")
    (tmp_path / "thing").rename(tmp_path / ".thing.replaced")
    remove_leftovers(tmp_path)
    assert (tmp_path / "thing" / "one").read_text() == "1"


def test_an_error_of_a_write_names_its_file(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space left") as caught, writing(tmp_path / "f"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert caught.value.filename == str(tmp_path / "f")
    with pytest.raises(OSError, match="I/O error") as caught, writing(tmp_path / "f"):
        raise SafetensorError("Error while serializing: I/O error: File too large (os error 27)")
    assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(tmp_path / "f"))


def test_an_output_that_is_a_symbolic_link_replaces_the_links_target(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    link, target = tmp_path / "out.json", tmp_path / "elsewhere" / "real.json"
    link.symlink_to(target)
    for data in (b"1", b"2"):
        check_output(link)
        write_whole(link, data)
        assert link.is_symlink()
        assert target.read_bytes() == data
    assert [file.name for file in target.parent.iterdir()] == ["real.json"]


def test_an_output_that_cannot_be_written_is_refused_and_not_changed(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    (tmp_path / "loop").symlink_to("loop")
    for path in (tmp_path / "pipe", tmp_path / "link", Path("/dev/null"), tmp_path, Path("/")):
        with pytest.raises(UserError, match=rf"^cannot write {path}: it exists and is not a regular file$"):
            check_output(path)
    for path in (tmp_path / "loop", tmp_path / "none" / "out", tmp_path / ("x" * 250), tmp_path / "pipe" / "out"):
        with pytest.raises(UserError, match=f"^cannot write {path}: "):
            check_output(path)
    assert (tmp_path / "pipe").is_fifo()
    assert len(list(tmp_path.iterdir())) == 3


def test_an_output_directory_that_cannot_be_written_is_refused_and_nothing_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "out", tmp_path / ("x" * 250), Path("/dev/null/out"), Path("/")):
        with pytest.raises(UserError, match=f"^cannot write {path}: "):
            check_output_directory(path)
    monkeypatch.chdir(tmp_path)
    for path in (tmp_path, tmp_path / "out", tmp_path / "a" / "b", Path()):
        check_output_directory(path)
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_an_output_in_a_directory_that_is_not_writable_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    if os.access(tmp_path, os.W_OK):
        pytest.skip("this user may write to any directory")
    with pytest.raises(UserError, match=r"^cannot write .*out: Permission denied$"):
        check_output(tmp_path / "out")

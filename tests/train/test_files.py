"""Files are whole or not there, and two runs do not share a place."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from io import FileIO
from pathlib import Path

import pytest

from jetflow_train import files
from jetflow_train.files import append_line, check_folder, cut_partial_line, replace_file, sole_use


class FullDisk:
    """A stream that takes `room` bytes and then no more."""

    def __init__(self, stream: FileIO, room: int) -> None:
        self._stream, self._room = stream, room

    def write(self, data: memoryview) -> int:
        if self._room == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = self._stream.write(data[: self._room])
        self._room -= taken
        return taken


def test_a_file_that_cannot_be_replaced_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    replace_file(path, b"old")

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="No space left"):
        replace_file(path, b"new")
    assert path.read_bytes() == b"old"
    assert [each.name for each in tmp_path.iterdir()] == ["file"]  # what was written takes no room


def test_a_line_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    with path.open("ab", buffering=0) as stream:
        size = append_line(stream, path, 0, b"one\n")
        with pytest.raises(OSError, match="No space left"):
            append_line(FullDisk(stream, 2), path, size, b"two\n")  # pyright: ignore[reportArgumentType]
        assert path.read_bytes() == b"one\n"
        assert append_line(stream, path, size, b"two\n") == 8
        stream.write(b"half")
    assert cut_partial_line(path) == 8
    assert cut_partial_line(path) == 8
    assert path.read_bytes() == b"one\ntwo\n"


@pytest.mark.parametrize(
    ("content", "left"), [(b"", b""), (b"\n", b"\n"), (b"h", b""), (b"half", b""), (b"a\n\nb", b"a\n\n")]
)
def test_half_a_line_is_cut_off(tmp_path: Path, content: bytes, left: bytes) -> None:
    path = tmp_path / "lines"
    path.write_bytes(content)
    assert cut_partial_line(path) == len(left)
    assert path.read_bytes() == left


def test_a_place_is_one_runs_until_it_ends(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from jetflow_train.files import sole_use\n"
        "with sole_use(Path(sys.argv[1])): print('here', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"here\n"
        with pytest.raises(ValueError, match="another run is writing here; wait for its end"), sole_use(tmp_path):
            pass
        other.kill()
    with sole_use(tmp_path):
        pass


def test_a_file_system_without_locks_lets_everybody_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(files.fcntl, "flock", unknown)
    with sole_use(tmp_path), sole_use(tmp_path):
        pass


def test_a_folder_that_takes_no_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_folder(tmp_path / "new" / "folder")
    assert not list((tmp_path / "new" / "folder").iterdir())

    def refuse(**_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(files.tempfile, "TemporaryFile", refuse)
    with pytest.raises(ValueError, match=r"new: cannot write the output folder \(.*Read-only.*; name another one"):
        check_folder(tmp_path / "new")

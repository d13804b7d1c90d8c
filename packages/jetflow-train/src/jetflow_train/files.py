"""Files that are whole or not there, and places that one run has for itself."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path


def replace_file(path: Path, content: bytes | memoryview) -> None:
    """Write a file so that a reader, or a crash, sees either the old content or the new. Leaves the old one on an OSError."""
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(partial, path)
    except OSError:
        if partial.is_file():
            partial.unlink()  # room on a full disk
        raise


def cut_partial_line(path: Path) -> int:
    """Cut off a last line without its newline, which a killed run has left; the size that is left."""
    with path.open("r+b") as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(size - 1, 0))
        if stream.read(1) not in (b"\n", b""):
            stream.seek(0)
            size = stream.read().rfind(b"\n") + 1
            stream.truncate(size)
    return size


def append_line(stream: FileIO, path: Path, size: int, line: bytes) -> int:
    """Append `line` to the unbuffered `stream` of the file `path`, which has `size` bytes; its new size.

    What keeps it from being written whole (OSError, an interrupt) leaves the file as it was.
    """
    rest = memoryview(line)
    try:
        while rest:
            rest = rest[stream.write(rest) :]
    except BaseException:
        os.truncate(path, size)
        raise
    return size + len(line)


def check_folder(path: Path) -> None:
    """Make the folder `path`. Raises ValueError where nothing can be written into it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise ValueError(f"{path}: cannot write the output folder ({error}); name another one") from error


@contextmanager
def sole_use(path: Path) -> Generator[None]:
    """Keep other runs out of the file or folder `path`. The system takes the lock back when a process ends, however it ends.

    Raises ValueError when another run is there. A file system that knows no locks lets everybody in.
    """
    place = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{path}: another run is writing here; wait for its end, or name another place") from None
        except OSError:
            pass
        yield
    finally:
        os.close(place)

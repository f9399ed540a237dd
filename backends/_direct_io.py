"""The one place that calls preadv, pwritev, fallocate, fsync and rename, and names what failed."""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tierstore.errors import CapacityError, CorruptError, TransferError

__all__ = [
    "DIRECTORY_MODE",
    "FILE_MODE",
    "allocate_file",
    "copy_data",
    "direct_io_refused",
    "direct_opening_refused",
    "has_other_links",
    "link_file",
    "make_directories",
    "make_directory",
    "move_file",
    "open_file",
    "read_full",
    "read_json",
    "remove_file",
    "replace_link",
    "sync_data",
    "sync_descriptor",
    "sync_directory",
    "write_full",
    "write_json",
]

FILE_MODE = 0o600
DIRECTORY_MODE = 0o700
_ADVICE = {
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.EACCES: "choose a directory that you may write to",
    errno.EPERM: "choose a directory that you may write to",
    errno.EROFS: "choose a directory on a file system that is not read-only",
}
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)
_COPY_NBYTES = 8 * 2**20
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFBIG)


@contextlib.contextmanager
def _named(what: str, path: Path) -> Iterator[None]:
    """Turn an OSError into a typed error that names the file and keeps the errno."""
    try:
        yield
    except (CapacityError, TransferError):
        raise
    except OSError as error:
        code = error.errno or errno.EIO
        message = f"{what} {path}: {os.strerror(code)}"
        if code in _NO_ROOM:
            raise CapacityError(code, f"{message}; free space or quota there") from error
        if code in _ADVICE:
            message += f"; {_ADVICE[code]}"
        raise TransferError(code, message) from error


@contextlib.contextmanager
def open_file(path: Path, *, write: bool = False, direct: bool = False) -> Iterator[int]:
    """File descriptor of an existing file, closed at the end; links are not followed.

    Raises
    ------
    TransferError
        The file can't be opened.
    """
    flags = (os.O_RDWR if write else os.O_RDONLY) | os.O_CLOEXEC | os.O_NOFOLLOW
    with _named("opening", path):
        descriptor = os.open(path, flags | (os.O_DIRECT if direct else 0))
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def read_full(descriptor: int, buffer: memoryview, offset: int, path: Path) -> None:
    """Fill `buffer` from byte `offset` on; short reads are continued, EINTR is retried by Python.

    Raises
    ------
    CorruptError
        The file ends before the buffer is full.
    TransferError
        The system's error, with its errno.
    """
    done = 0
    while done < len(buffer):
        with _named(f"reading at byte {offset + done} of", path):
            count = os.preadv(descriptor, [buffer[done:]], offset + done)
        if count == 0:
            raise CorruptError(
                f"{path} ends at byte {offset + done}, {len(buffer) - done} bytes too early: it "
                "was cut short or is not the file that was written"
            )
        done += count


def write_full(descriptor: int, buffer: memoryview, offset: int, path: Path) -> None:
    """Write all of `buffer` at byte `offset`; short writes are continued.

    Raises
    ------
    CapacityError
        No space or quota left, or the file would be larger than is allowed.
    TransferError
        The system's error, with its errno.
    """
    done = 0
    while done < len(buffer):
        with _named(f"writing at byte {offset + done} of", path):
            count = os.pwritev(descriptor, [buffer[done:]], offset + done)
            if count == 0:
                raise OSError(errno.EIO, "nothing was written")
        done += count


def sync_data(path: Path) -> None:
    """Bring a file's data to the drive."""
    with open_file(path, write=True) as descriptor:
        sync_descriptor(descriptor, path)


def sync_descriptor(descriptor: int, path: Path) -> None:
    """Bring the data of an open file to the drive."""
    with _named("syncing", path):
        os.fdatasync(descriptor)


def sync_directory(path: Path) -> None:
    """Bring a directory's entries to the drive."""
    with _named("syncing", path):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def make_directories(path: Path) -> None:
    """Make a directory and those above it that are missing, each for its owner only."""
    missing = [path]
    while not missing[-1].exists():
        missing.append(missing[-1].parent)
    for directory in reversed(missing[:-1]):
        make_directory(directory, exist_ok=True)
        sync_directory(directory.parent)
    if not path.is_dir():
        raise TransferError(errno.ENOTDIR, f"{path} is not a directory")


def make_directory(path: Path, *, exist_ok: bool = False) -> None:
    """Make one directory, readable by its owner only."""
    with _named("making", path):
        try:
            os.mkdir(path, DIRECTORY_MODE)
        except FileExistsError:
            if not exist_ok or not path.is_dir():
                raise


def allocate_file(path: Path, nbytes: int) -> None:
    """Make a new file with every byte reserved.

    Raises
    ------
    CapacityError
        There is no room; the partial file is removed.
    TransferError
        The file exists, or the system's error.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with _named("making", path):
        descriptor = os.open(path, flags, FILE_MODE)
    try:
        with _named(f"reserving {nbytes:,} bytes for", path):
            os.posix_fallocate(descriptor, 0, nbytes)
    except BaseException:
        # Where space runs out, ext4 leaves what it had already reserved.
        os.unlink(path)
        raise
    finally:
        os.close(descriptor)


def copy_data(source: Path, target: Path, nbytes: int) -> None:
    """Copy all of a file over an allocated one of the same length, and sync it."""
    with open_file(source) as reader, open_file(target, write=True) as writer:
        buffer = memoryview(bytearray(min(nbytes, _COPY_NBYTES)))
        for start in range(0, nbytes, _COPY_NBYTES):
            part = buffer[: nbytes - start]
            read_full(reader, part, start, source)
            write_full(writer, part, start, target)
        sync_descriptor(writer, target)


def write_json(path: Path, value: Any) -> None:
    """Replace a file by this JSON value, whole or not at all, and durably."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    data = json.dumps(value, indent=1, allow_nan=False).encode()
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with _named("writing", path):
        descriptor = os.open(temporary, flags, FILE_MODE)
        try:
            try:
                write_full(descriptor, memoryview(data), 0, temporary)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            # The new content must be on the drive before its name is, and the name before the
            # caller goes on.
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            raise
    sync_directory(path.parent)


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises
    ------
    CorruptError
        Missing, or not JSON.
    """
    try:
        with open_file(path) as descriptor, os.fdopen(os.dup(descriptor), "rb") as file:
            return json.load(file)
    except TransferError as error:
        if error.errno == errno.ENOENT:
            raise CorruptError(f"{path} is missing") from error
        raise
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"{path} is not readable as JSON: {error}") from error


def replace_link(path: Path, target: str) -> None:
    """Let the symbolic link `path` point to `target`, in one step."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with _named("linking", path):
        os.symlink(target, temporary)
        os.replace(temporary, path)


def link_file(path: Path, target: Path) -> None:
    """Give a file the second name `target`, as a hard link.

    Raises
    ------
    TransferError
        The file system makes no hard links (or no more of this file), or the system's error.
    """
    with _named("linking", target):
        try:
            os.link(path, target, follow_symlinks=False)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            raise TransferError(
                error.errno,
                f"{path} can't be given the second name {target}: {os.strerror(error.errno)}. "
                "Freezing needs hard links; use a local ext4 or xfs file system, or copy the state "
                "instead (snapshot)",
            ) from error


def has_other_links(path: Path) -> bool:
    """Whether a file is there and has names beside this one."""
    with _named("looking at", path), contextlib.suppress(FileNotFoundError):
        return os.lstat(path).st_nlink > 1
    return False


def move_file(path: Path, target: Path) -> None:
    """Let a file's name be `target`, in one step, in place of the file that has it now."""
    with _named("moving", path):
        os.rename(path, target)


def remove_file(path: Path) -> None:
    """Remove a file, if it is there."""
    with _named("removing", path), contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def direct_io_refused(directory: Path) -> str:
    """Try a direct write and read in a directory.

    Returns
    -------
    str
        Empty if both work; else why the file system refuses them.

    Raises
    ------
    CapacityError, TransferError
        It could not be tried: no space, no permission.
    """
    path = directory / f".probe-{secrets.token_hex(4)}"
    block = mmap.mmap(-1, 4096)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_DIRECT
    try:
        with _named("trying direct I/O with", path):
            descriptor = os.open(path, flags, FILE_MODE)
            try:
                os.pwritev(descriptor, [block], 0)
                os.preadv(descriptor, [block], 0)
            finally:
                os.close(descriptor)
    except TransferError as error:
        return _refusal(error)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    return ""


def direct_opening_refused(path: Path) -> str:
    """Try to open an existing file for direct I/O; returns and raises as `direct_io_refused`."""
    try:
        with open_file(path, direct=True):
            return ""
    except TransferError as error:
        return _refusal(error)


def _refusal(error: TransferError) -> str:
    if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
        raise error
    return f"the file system refuses O_DIRECT ({os.strerror(error.errno)})"

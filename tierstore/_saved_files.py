"""Read-only access to the files of a store at rest: plain ones, or any that fsspec reaches."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from tierstore.errors import (
    BackendUnavailableError,
    ConfigError,
    CorruptError,
    TierStoreError,
    TransferError,
)

__all__ = ["LocalFiles", "RemoteFiles", "SavedFiles", "attributes_of", "open_files"]


class SavedFiles(Protocol):
    """Files below a root; paths are relative to it, with ``/`` between names.

    Raises
    ------
    CorruptError
        There is no such file, or it is shorter than what is asked for.
    TransferError
        The system's error, with its errno.
    """

    def names(self, path: str) -> list[str]:
        """What a directory holds."""

    def nbytes(self, path: str) -> int:
        """Length of a file."""

    def read(self, path: str, start: int, nbytes: int) -> bytes:
        """Bytes of a file that is known to be as long."""


class LocalFiles:
    """Plain files; no link below the root is followed.

    Parameters
    ----------
    root
        The directory, which may itself be reached by a link: the user named it.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def __str__(self) -> str:
        return str(self.root)

    def names(self, path: str) -> list[str]:
        """See `SavedFiles`."""
        with self._open(path) as descriptor:
            return os.listdir(descriptor)

    def nbytes(self, path: str) -> int:
        """See `SavedFiles`."""
        with self._open(path) as descriptor:
            found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise CorruptError(f"{self.root / path} is not a file")
        return found.st_size

    def read(self, path: str, start: int, nbytes: int) -> bytes:
        """See `SavedFiles`."""
        with self._open(path) as descriptor, os.fdopen(os.dup(descriptor), "rb") as file:
            file.seek(start)
            return _whole(file.read(nbytes), nbytes, f"{self.root / path}", start)

    @contextlib.contextmanager
    def _open(self, path: str) -> Iterator[int]:
        # Name by name, so that no directory on the way can be a link either. A pipe in the place
        # of a file must not be waited for.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
        with _named(self.root / path), contextlib.ExitStack() as opened:
            descriptor = os.open(self.root, flags)
            opened.callback(os.close, descriptor)
            for name in filter(None, path.split("/")):
                descriptor = os.open(name, flags | os.O_NOFOLLOW, dir_fd=descriptor)
                opened.callback(os.close, descriptor)
            yield descriptor


class RemoteFiles:
    """Files of a file system of fsspec's.

    Parameters
    ----------
    file_system, root
        What ``fsspec.core.url_to_fs`` gives.
    """

    def __init__(self, file_system: Any, root: str) -> None:
        self.file_system = file_system
        self.root = root.rstrip("/")

    def __str__(self) -> str:
        return str(self.file_system.unstrip_protocol(self.root))

    def names(self, path: str) -> list[str]:
        """See `SavedFiles`."""
        with _named(self._at(path)):
            found = self.file_system.ls(self._at(path), detail=False)
        return [entry.rstrip("/").rpartition("/")[2] for entry in found]

    def nbytes(self, path: str) -> int:
        """See `SavedFiles`."""
        with _named(self._at(path)):
            found = self.file_system.info(self._at(path))
        if found["type"] != "file" or not isinstance(found["size"], int):
            raise CorruptError(f"{self._at(path)} is not a file, or has no known length")
        return found["size"]

    def read(self, path: str, start: int, nbytes: int) -> bytes:
        """See `SavedFiles`."""
        with _named(self._at(path)):
            data = self.file_system.cat_file(self._at(path), start=start, end=start + nbytes)
        return _whole(data, nbytes, self._at(path), start)

    def _at(self, path: str) -> str:
        return f"{self.root}/{path}" if path else self.root


def open_files(location: str | os.PathLike[str], options: dict[str, Any]) -> SavedFiles:
    """Files below a path, or a URL that fsspec knows.

    Raises
    ------
    BackendUnavailableError
        fsspec, or the package that it needs for this URL, is not installed.
    ConfigError
        It is a URL of no known kind.
    """
    text = os.fspath(location)
    if "://" not in text and "::" not in text:
        return LocalFiles(Path(text).absolute())
    try:
        file_system, root = import_module("fsspec.core").url_to_fs(text, **options)
    except ImportError as error:
        raise BackendUnavailableError(f"{text} can't be opened: {error}") from error
    except ValueError as error:
        raise ConfigError(f"{text} is no URL that fsspec can open: {error}") from error
    if "file" in (file_system.protocol, *file_system.protocol):
        return LocalFiles(Path(root))
    # What it may remember of directories is from before this store was looked at.
    file_system.invalidate_cache()
    return RemoteFiles(file_system, root)


def attributes_of(files: SavedFiles, path: str) -> dict[str, Any]:
    """What stands under the attribute ``tierstore`` of a group.

    Raises
    ------
    CorruptError
        It is missing, or no zarr group of ours.
    """
    found = read_json(files, path)
    try:
        found = found["attributes"]["tierstore"]
    except (KeyError, TypeError, IndexError) as error:
        raise CorruptError(f"{files}/{path} has no tierstore attributes") from error
    if not isinstance(found, dict):
        raise CorruptError(f"{files}/{path} has no tierstore attributes")
    return found


def read_json(files: SavedFiles, path: str) -> Any:
    """A file of JSON.

    Raises
    ------
    CorruptError
        It is missing, or not JSON.
    """
    data = files.read(path, 0, files.nbytes(path))
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"{files}/{path} is not readable as JSON: {error}") from error


def _whole(data: bytes, nbytes: int, path: str, start: int) -> bytes:
    if len(data) != nbytes:
        raise CorruptError(
            f"{path} ends at byte {start + len(data)}, {nbytes - len(data)} bytes too early"
        )
    return data


@contextlib.contextmanager
def _named(path: object) -> Iterator[None]:
    """Turn whatever a file system raises into a typed error that names the file."""
    try:
        yield
    except TierStoreError:
        raise
    except FileNotFoundError as error:
        raise CorruptError(f"{path} is missing") from error
    except Exception as error:  # those of fsspec's many file systems have no common root
        code = getattr(error, "errno", None) or errno.EIO
        if code == errno.ELOOP:
            raise ConfigError(
                f"{path} is a link, or behind one, and links are not followed. If the store has "
                "chunks in several directories, name the further ones in the order of "
                "--optimizer-state-dir"
            ) from error
        raise TransferError(code, f"reading {path}: {error}") from error

"""One chunk file of a rank's directory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tierstore.backends import _direct_io
from tierstore.zarr_format import ArrayFormat

__all__ = ["ChunkFile"]


@dataclass(frozen=True, slots=True)
class ChunkFile:
    """One chunk of one array in one generation, in directory number `place`."""

    path: Path
    format: ArrayFormat
    n_tiles: int
    place: int

    @property
    def nbytes(self) -> int:
        """Length of the file."""
        return self.format.file_nbytes(self.n_tiles)

    def make(self, path: Path) -> None:
        """Make a new file that can be this chunk: every byte reserved, and the header written.

        Raises
        ------
        CapacityError, TransferError
            The system's error.
        """
        _direct_io.allocate_file(path, self.nbytes)
        with _direct_io.open_file(path, write=True) as descriptor:
            header = memoryview(self.format.header(self.n_tiles))
            _direct_io.write_full(descriptor, header, 0, path)
        _direct_io.sync_data(path)

"""The bytes and the metadata of state arrays at rest: zarr v3, and nothing else.

Each array is a ``sharding_indexed`` array whose shard is a chunk and whose inner chunk is a tile.
The shard index stands at the start of the file and never changes, because every tile has a fixed
place::

    0                header_nbytes                      + stride
    | shard index    | tile 0         | crc | padding   | tile 1 ...
      whole blocks     whole blocks     one block

Everything starts at a multiple of 4096, so direct I/O works on the file as it is, and one tile
with its checksum is one contiguous write. Any zarr v3 reader opens it, reads one tile for one
element, and refuses a flipped bit. This module is pure: it makes and reads bytes and JSON values.

The layout of the index (pairs of little-endian uint64 offset and nbytes, then crc32c) and of the
metadata is from the zarr v3 specification and the ``sharding_indexed`` codec specification.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import crc32c as _crc32c
import numpy as np

from tierstore.errors import LayoutError

__all__ = [
    "ARRAY_DTYPES",
    "BLOCK_NBYTES",
    "CHECKSUM_NBYTES",
    "FORMAT_VERSION",
    "ArrayFormat",
    "ArrayType",
    "checksum",
    "group_metadata",
]

FORMAT_VERSION = 1
BLOCK_NBYTES = 4096
CHECKSUM_NBYTES = 4
_MISSING = 2**64 - 1


@dataclass(frozen=True, slots=True)
class ArrayType:
    """How elements of one torch type are kept in zarr.

    Parameters
    ----------
    name
        Torch's name of the type without the module.
    itemsize
        Bytes of an element.
    zarr
        zarr's name of the type that holds the bits.
    fill_value
        A NaN: what a reader sees where a file is lost. For types that zarr lacks, the bit pattern
        of the type's own NaN.
    """

    name: str
    itemsize: int
    zarr: str
    fill_value: str | int


ARRAY_DTYPES: Mapping[str, ArrayType] = {
    kind.name: kind
    for kind in (
        ArrayType("float32", 4, "float32", "NaN"),
        ArrayType("float16", 2, "float16", "NaN"),
        ArrayType("bfloat16", 2, "uint16", 0x7FC0),
        ArrayType("float8_e4m3fn", 1, "uint8", 0x7F),
        ArrayType("float8_e5m2", 1, "uint8", 0x7E),
    )
}


def checksum(data: Any) -> bytes:
    """The 4 bytes that zarr's ``crc32c`` codec puts after `data` (any contiguous buffer)."""
    return _crc32c.crc32c(data).to_bytes(CHECKSUM_NBYTES, "little")


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayFormat:
    """Places and metadata of one array's chunk files.

    Parameters
    ----------
    dtype
        Key of `ARRAY_DTYPES`.
    numel, chunk_numel, tile_numel
        The grid of the layout, in elements.
    checksums
        Whether tiles carry a crc32c (left out where bytes never pass the CPU).

    Raises
    ------
    LayoutError
        Unknown type, or chunks and tiles that are no whole tiles and 4096-byte blocks.
    """

    dtype: str
    numel: int
    chunk_numel: int
    tile_numel: int
    checksums: bool = True

    def __post_init__(self) -> None:
        if self.dtype not in ARRAY_DTYPES:
            raise LayoutError(
                f"arrays of type {self.dtype!r} can't be stored; known: {', '.join(ARRAY_DTYPES)}"
            )
        if self.tile_numel < 1 or self.chunk_numel % self.tile_numel or self.chunk_numel < 1:
            raise LayoutError(
                f"a chunk of {self.chunk_numel} elements is no whole number of tiles of "
                f"{self.tile_numel}"
            )
        if self.tile_nbytes % BLOCK_NBYTES:
            raise LayoutError(
                f"a tile of {self.tile_numel} elements of {self.dtype} has {self.tile_nbytes} "
                f"bytes, no multiple of {BLOCK_NBYTES}; choose a tile of a multiple of "
                f"{BLOCK_NBYTES // self.type.itemsize} elements"
            )

    @property
    def type(self) -> ArrayType:
        """How the elements are kept."""
        return ARRAY_DTYPES[self.dtype]

    @property
    def tile_nbytes(self) -> int:
        """Bytes of a tile's elements."""
        return self.tile_numel * self.type.itemsize

    @property
    def stride_nbytes(self) -> int:
        """Bytes from one tile to the next: the elements, and a block for the checksum."""
        return self.tile_nbytes + (BLOCK_NBYTES if self.checksums else 0)

    @property
    def tiles_per_chunk(self) -> int:
        """Tiles that a full chunk holds."""
        return self.chunk_numel // self.tile_numel

    @property
    def header_nbytes(self) -> int:
        """Bytes in front of the first tile: the shard index in whole blocks."""
        index_nbytes = 16 * self.tiles_per_chunk + CHECKSUM_NBYTES
        return -(-index_nbytes // BLOCK_NBYTES) * BLOCK_NBYTES

    def tile_offset(self, place: int) -> int:
        """Byte of the file where the tile at `place` starts."""
        return self.header_nbytes + place * self.stride_nbytes

    def file_nbytes(self, n_tiles: int) -> int:
        """Length of the file of a chunk that holds `n_tiles` tiles."""
        return self.header_nbytes + n_tiles * self.stride_nbytes

    def header(self, n_tiles: int) -> bytes:
        """The file's first `header_nbytes` bytes: index, its checksum, zeros."""
        index = np.full((self.tiles_per_chunk, 2), _MISSING, dtype="<u8")
        places = np.arange(n_tiles, dtype="<u8")
        index[:n_tiles, 0] = self.header_nbytes + places * self.stride_nbytes
        index[:n_tiles, 1] = self.tile_nbytes + (CHECKSUM_NBYTES if self.checksums else 0)
        body = index.tobytes()
        return (body + checksum(body)).ljust(self.header_nbytes, b"\0")

    def metadata(self) -> dict[str, Any]:
        """The array's ``zarr.json`` as a JSON value."""
        tile_codecs: list[dict[str, Any]] = [_bytes_codec(self.type.zarr)]
        if self.checksums:
            tile_codecs.append({"name": "crc32c"})
        return {
            "zarr_format": 3,
            "node_type": "array",
            "shape": [self.numel],
            "data_type": self.type.zarr,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [self.chunk_numel]}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "fill_value": self.type.fill_value,
            "codecs": [
                {
                    "name": "sharding_indexed",
                    "configuration": {
                        "chunk_shape": [self.tile_numel],
                        "codecs": tile_codecs,
                        "index_codecs": [_bytes_codec("uint64"), {"name": "crc32c"}],
                        "index_location": "start",
                    },
                }
            ],
            "dimension_names": ["element"],
            "attributes": {"tierstore": {"dtype": self.dtype}},
        }

    @staticmethod
    def chunk_key(chunk: int) -> str:
        """Path of a chunk file below the array's directory."""
        return f"c/{chunk}"


def group_metadata(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """A group's ``zarr.json``; what is ours stands under the attribute ``tierstore``."""
    return {
        "zarr_format": 3,
        "node_type": "group",
        "attributes": {"tierstore": dict(attributes)},
    }


def _bytes_codec(zarr_dtype: str) -> dict[str, Any]:
    # One-byte types have no byte order, and zarr refuses one for them.
    if zarr_dtype == "uint8":
        return {"name": "bytes"}
    return {"name": "bytes", "configuration": {"endian": "little"}}

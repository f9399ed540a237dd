"""Chunk files written from `ArrayFormat` alone, read by plain zarr."""

from __future__ import annotations

import importlib
import itertools
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import numpy.typing as npt
import pytest
import zarr
from hypothesis import example, given, settings
from zarr.abc.store import ByteRequest
from zarr.core.buffer import Buffer, BufferPrototype
from zarr.storage import LocalStore

from tierstore.errors import LayoutError
from tierstore.layout import StateLayout
from tierstore.zarr_format import (
    ARRAY_DTYPES,
    BLOCK_NBYTES,
    CHECKSUM_NBYTES,
    FORMAT_VERSION,
    ArrayFormat,
    checksum,
    group_metadata,
)

FLOATS = ("float32", "float16")
BITS = ("bfloat16", "float8_e4m3fn", "float8_e5m2")

# ----------------------------------------------------------------------------------- files by hand


def make_format(**changed: Any) -> ArrayFormat:
    fields: dict[str, Any] = {
        "dtype": "float32",
        "numel": 9500,
        "chunk_numel": 4096,
        "tile_numel": 1024,
    }
    return ArrayFormat(**fields | changed)


def tiles_by_chunk(form: ArrayFormat) -> list[int]:
    """How many tiles each chunk holds, counted one by one."""
    chunks: list[int] = []
    for start in range(0, form.numel, form.tile_numel):
        if start % form.chunk_numel == 0:
            chunks.append(0)
        chunks[-1] += 1
    return chunks


def random_values(form: ArrayFormat, seed: int = 0) -> npt.NDArray[Any]:
    """Every bit pattern but NaN, which equals nothing."""
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 256, form.numel * form.type.itemsize, dtype=np.uint8)
    array = values.view(form.type.zarr)
    return np.where(array == array, array, np.zeros_like(array))


def chunk_bytes(form: ArrayFormat, values: npt.NDArray[Any], n_tiles: int) -> bytearray:
    """One chunk file: values from the start of the chunk, as many as there are."""
    file = bytearray(form.file_nbytes(n_tiles))
    file[: form.header_nbytes] = form.header(n_tiles)
    for place in range(n_tiles):
        tile = values[place * form.tile_numel :][: form.tile_numel].tobytes()
        tile = tile.ljust(form.tile_nbytes, b"\0")
        start = form.tile_offset(place)
        file[start : start + form.tile_nbytes] = tile
        if form.checksums:
            end = start + form.tile_nbytes
            file[end : end + CHECKSUM_NBYTES] = checksum(tile)
    return file


def write_array(directory: Path, form: ArrayFormat, values: npt.NDArray[Any]) -> None:
    (directory / "c").mkdir(parents=True)
    (directory / "zarr.json").write_text(json.dumps(form.metadata(), allow_nan=False))
    for chunk, n_tiles in enumerate(tiles_by_chunk(form)):
        file = chunk_bytes(form, values[chunk * form.chunk_numel :], n_tiles)
        (directory / form.chunk_key(chunk)).write_bytes(file)


def open_array(source: Any) -> zarr.Array[Any]:
    array = zarr.open(source, mode="r")
    assert isinstance(array, zarr.Array)
    return array


def read(array: zarr.Array[Any], key: Any = slice(None)) -> npt.NDArray[Any]:
    return np.asarray(array[key])


@contextmanager
def written(form: ArrayFormat, seed: int = 0) -> Iterator[tuple[Path, npt.NDArray[Any]]]:
    """An array in a directory of its own, which hypothesis needs for each example."""
    with tempfile.TemporaryDirectory() as name:
        values = random_values(form, seed)
        write_array(Path(name) / "array", form, values)
        yield Path(name) / "array", values


def flip(path: Path, byte: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[byte] ^= 1 << bit
    path.write_bytes(data)


@st.composite
def formats(draw: st.DrawFn) -> ArrayFormat:
    dtype = draw(st.sampled_from(sorted(ARRAY_DTYPES)))
    unit = BLOCK_NBYTES // ARRAY_DTYPES[dtype].itemsize
    tile_numel = unit * draw(st.integers(1, 3))
    chunk_numel = tile_numel * draw(st.integers(1, 4))
    return ArrayFormat(
        dtype=dtype,
        numel=draw(
            st.one_of(
                st.integers(1, 3 * chunk_numel),
                st.sampled_from([1, tile_numel, tile_numel + 1, chunk_numel, chunk_numel + 1]),
            )
        ),
        chunk_numel=chunk_numel,
        tile_numel=tile_numel,
        checksums=draw(st.booleans()),
    )


# ------------------------------------------------------------------------------- read by plain zarr


@given(formats(), st.integers(0, 2**32 - 1), st.data())
@settings(max_examples=60)
@example(make_format(numel=1), 0, None)
def test_zarr_reads_what_was_written(form: ArrayFormat, seed: int, data: Any) -> None:
    with written(form, seed) as (path, values):
        array = open_array(path)
        assert array.shape == (form.numel,)
        assert array.dtype == np.dtype(form.type.zarr)
        assert array.shards == (form.chunk_numel,)
        assert array.chunks == (form.tile_numel,)
        assert array.metadata.dimension_names == ("element",)  # type: ignore[union-attr]
        assert array.attrs["tierstore"] == {"dtype": form.dtype}
        assert read(array).tobytes() == values.tobytes()
        element = 0 if data is None else data.draw(st.integers(0, form.numel - 1), "element")
        assert read(array, element).tobytes() == values[element].tobytes()


@pytest.mark.parametrize("dtype", ARRAY_DTYPES)
def test_zarr_reads_a_slice_across_tiles_and_chunks(dtype: str) -> None:
    form = make_format(dtype=dtype, numel=20_000, chunk_numel=8192, tile_numel=4096)
    with written(form) as (path, values):
        for cut in (slice(4000, 4200), slice(8191, 8193), slice(100, 19_999, 777)):
            assert read(open_array(path), cut).tobytes() == values[cut].tobytes()


class CountingStore(LocalStore):
    """Counts the bytes of chunk files that zarr asks for, by whichever way it reads."""

    data_nbytes = 0

    def _count(self, key: str, data: Buffer | None) -> Buffer | None:
        if data is not None and not key.endswith("zarr.json"):
            self.data_nbytes += len(data)
        return data

    async def get(
        self,
        key: str,
        prototype: BufferPrototype | None = None,
        byte_range: ByteRequest | None = None,
    ) -> Buffer | None:
        return self._count(key, await super().get(key, prototype, byte_range))

    def get_sync(
        self,
        key: str,
        *,
        prototype: BufferPrototype | None = None,
        byte_range: ByteRequest | None = None,
    ) -> Buffer | None:
        return self._count(key, super().get_sync(key, prototype=prototype, byte_range=byte_range))

    async def get_partial_values(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("not counted")


@given(formats(), st.data())
@settings(max_examples=30)
def test_one_element_costs_the_index_and_one_tile(form: ArrayFormat, data: st.DataObject) -> None:
    element = data.draw(st.integers(0, form.numel - 1), "element")
    with written(form) as (path, values):
        store = CountingStore(path, read_only=True)
        array = open_array(store)
        assert store.data_nbytes == 0
        assert read(array, element).tobytes() == values[element].tobytes()
        if form.tiles_per_chunk == 1:
            # Zarr takes a file of one tile whole: the index in its block, the tile in its stride.
            assert store.data_nbytes == form.file_nbytes(1)
        else:
            index_nbytes = 16 * form.tiles_per_chunk + CHECKSUM_NBYTES
            tile_nbytes = form.tile_nbytes + CHECKSUM_NBYTES * form.checksums
            assert store.data_nbytes == index_nbytes + tile_nbytes


@pytest.mark.parametrize("checksums", [True, False])
def test_shorter_last_chunk(tmp_path: Path, checksums: bool) -> None:
    form = make_format(checksums=checksums)
    values = random_values(form)
    write_array(tmp_path / "array", form, values)
    sizes = [(tmp_path / "array" / form.chunk_key(chunk)).stat().st_size for chunk in range(3)]
    stride = 4096 + 4096 * checksums
    assert sizes == [4096 + 4 * stride, 4096 + 4 * stride, 4096 + 2 * stride]
    assert read(open_array(tmp_path / "array")).tobytes() == values.tobytes()


def test_an_empty_array(tmp_path: Path) -> None:
    layout = StateLayout.plan([])
    form = make_format(
        numel=layout.numel, chunk_numel=layout.chunk_numel, tile_numel=layout.tile_numel
    )
    write_array(tmp_path / "array", form, np.zeros(0, np.float32))
    array = open_array(tmp_path / "array")
    assert array.shape == (0,)
    assert read(array).size == 0


# ------------------------------------------------------------------------------------ damaged files


@given(formats(), st.data())
@settings(max_examples=60)
def test_a_flipped_bit_is_refused(form: ArrayFormat, data: st.DataObject) -> None:
    with written(form) as (path, values):
        counts = tiles_by_chunk(form)
        chunk = data.draw(st.integers(0, len(counts) - 1), "chunk")
        place = data.draw(st.integers(0, counts[chunk] - 1), "place")
        byte = data.draw(
            st.one_of(
                st.integers(0, form.tile_nbytes + CHECKSUM_NBYTES - 1),
                st.sampled_from([0, form.tile_nbytes - 1, form.tile_nbytes]),
            ),
            "byte of the tile and its checksum",
        )
        if not form.checksums:
            byte = min(byte, form.tile_nbytes - 1)
        flip(
            path / form.chunk_key(chunk),
            form.tile_offset(place) + byte,
            data.draw(st.integers(0, 7), "bit"),
        )
        tile = chunk * form.tiles_per_chunk + place
        first = tile * form.tile_numel
        if form.checksums:
            with pytest.raises(ValueError, match="checksum"):
                read(open_array(path), first)
            with pytest.raises(ValueError, match="checksum"):
                read(open_array(path))
        else:
            assert read(open_array(path), first).shape == ()
        # All other tiles read as before.
        for start in range(0, form.numel, form.tile_numel):
            if start != first:
                cut = slice(start, min(start + form.tile_numel, form.numel))
                assert read(open_array(path), cut).tobytes() == values[cut].tobytes()


@pytest.mark.parametrize("checksums", [True, False])
@pytest.mark.parametrize("byte", [0, 7, 8, 63, 64, 67])
def test_a_flipped_bit_in_the_index_is_refused(tmp_path: Path, byte: int, checksums: bool) -> None:
    form = make_format(checksums=checksums)
    write_array(tmp_path / "array", form, random_values(form))
    assert form.tiles_per_chunk * 16 == 64
    flip(tmp_path / "array" / "c/0", byte)
    with pytest.raises(ValueError, match="checksum"):
        read(open_array(tmp_path / "array"), 0)


@pytest.mark.parametrize("dtype", ARRAY_DTYPES)
def test_a_tile_that_was_never_written_is_refused(tmp_path: Path, dtype: str) -> None:
    form = make_format(dtype=dtype, numel=12_288, chunk_numel=8192, tile_numel=4096)
    values = random_values(form)
    write_array(tmp_path / "array", form, values)
    path = tmp_path / "array" / "c/0"
    data = bytearray(path.read_bytes())
    data[form.tile_offset(1) :] = bytes(form.stride_nbytes)
    path.write_bytes(data)
    array = open_array(tmp_path / "array")
    with pytest.raises(ValueError, match="checksum"):
        read(array, 4096)
    assert read(array, slice(0, 4096)).tobytes() == values[:4096].tobytes()
    assert read(array, slice(8192, None)).tobytes() == values[8192:].tobytes()


@pytest.mark.parametrize("dtype", ARRAY_DTYPES)
def test_a_tile_of_zeros_with_its_checksum_reads_as_zeros(tmp_path: Path, dtype: str) -> None:
    form = make_format(dtype=dtype, numel=4096, chunk_numel=4096, tile_numel=4096)
    write_array(tmp_path / "array", form, np.zeros(4096, form.type.zarr))
    assert checksum(bytes(form.tile_nbytes)) != bytes(CHECKSUM_NBYTES)
    assert not read(open_array(tmp_path / "array")).any()


@pytest.mark.parametrize("dtype", ARRAY_DTYPES)
def test_a_removed_chunk_reads_as_nan(tmp_path: Path, dtype: str) -> None:
    form = make_format(dtype=dtype, numel=12_000, chunk_numel=4096, tile_numel=4096)
    values = random_values(form)
    write_array(tmp_path / "array", form, values)
    (tmp_path / "array" / "c/1").unlink()
    found = read(open_array(tmp_path / "array"))
    assert found[:4096].tobytes() == values[:4096].tobytes()
    assert found[8192:].tobytes() == values[8192:].tobytes()
    lost = found[4096:8192]
    if dtype in FLOATS:
        assert np.isnan(lost).all()
    else:
        assert (lost == form.type.fill_value).all()


@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize("library", ["torch", "ml_dtypes"])
def test_what_reads_for_a_lost_file_is_nan_in_its_own_type(dtype: str, library: str) -> None:
    pytest.importorskip(library)
    kind = ARRAY_DTYPES[dtype]
    bits = np.full(3, kind.fill_value, kind.zarr)
    owner = getattr(importlib.import_module(library), dtype)
    if library == "torch":
        import torch

        assert torch.from_numpy(bits).view(owner).float().isnan().all()
    else:
        assert np.isnan(bits.view(owner).astype(np.float32)).all()


@pytest.mark.parametrize("dtype", ARRAY_DTYPES)
def test_types_are_torch_types_of_the_same_size(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    kind = ARRAY_DTYPES[dtype]
    assert kind.name == dtype
    assert kind.itemsize == getattr(torch, dtype).itemsize == np.dtype(kind.zarr).itemsize


# ------------------------------------------------------------------------------------------- places


@given(formats())
def test_everything_is_aligned(form: ArrayFormat) -> None:
    places = [form.tile_offset(place) for place in range(form.tiles_per_chunk + 1)]
    sizes = [form.header_nbytes, form.tile_nbytes, form.stride_nbytes, form.file_nbytes(1)]
    assert all(number % BLOCK_NBYTES == 0 and number > 0 for number in places + sizes)
    assert places[0] == form.header_nbytes >= 16 * form.tiles_per_chunk + CHECKSUM_NBYTES
    assert form.file_nbytes(form.tiles_per_chunk) == places[-1]
    assert {b - a for a, b in itertools.pairwise(places)} == {form.stride_nbytes}
    assert form.stride_nbytes >= form.tile_nbytes + CHECKSUM_NBYTES * form.checksums


def test_default_grid() -> None:
    layout = StateLayout.plan([], numel=10**10)
    form = make_format(
        numel=layout.numel, chunk_numel=layout.chunk_numel, tile_numel=layout.tile_numel
    )
    assert (form.tiles_per_chunk, form.header_nbytes) == (47, 4096)
    assert form.stride_nbytes == 16 * 2**20 + 4096
    assert form.file_nbytes(47) == 4096 + 47 * (16 * 2**20 + 4096)


def test_an_index_longer_than_a_block(tmp_path: Path) -> None:
    form = make_format(numel=300 * 1024, chunk_numel=300 * 1024)
    assert form.header_nbytes == 2 * BLOCK_NBYTES
    assert make_format(chunk_numel=255 * 1024).header_nbytes == BLOCK_NBYTES
    assert make_format(chunk_numel=256 * 1024).header_nbytes == 2 * BLOCK_NBYTES
    values = random_values(form)
    write_array(tmp_path / "array", form, values)
    assert read(open_array(tmp_path / "array")).tobytes() == values.tobytes()


@given(formats())
def test_header_is_the_index_of_the_specification(form: ArrayFormat) -> None:
    for n_tiles in {1, form.tiles_per_chunk}:
        header = form.header(n_tiles)
        assert len(header) == form.header_nbytes
        index_nbytes = 16 * form.tiles_per_chunk
        index = np.frombuffer(header[:index_nbytes], "<u8").reshape(-1, 2)
        tile_nbytes = form.tile_nbytes + CHECKSUM_NBYTES * form.checksums
        assert index[:n_tiles].tolist() == [
            [form.tile_offset(place), tile_nbytes] for place in range(n_tiles)
        ]
        assert (index[n_tiles:] == 2**64 - 1).all()
        end = index_nbytes + CHECKSUM_NBYTES
        assert header[index_nbytes:end] == checksum(header[:index_nbytes])
        assert header[end:] == bytes(len(header) - end)


@pytest.mark.parametrize(
    ("dtype", "tile_numel", "message"),
    [
        ("float64", 4096, "float64"),
        ("int8", 4096, "int8"),
        ("float16", 1024, "multiple of 2048 elements"),
        ("bfloat16", 3072, "multiple of 2048 elements"),
        ("float8_e5m2", 2048, "multiple of 4096 elements"),
        ("float32", 1000, "multiple of 1024 elements"),
    ],
)
def test_what_can_not_be_stored_is_refused(dtype: str, tile_numel: int, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        make_format(dtype=dtype, tile_numel=tile_numel, chunk_numel=tile_numel)


@given(st.integers(1, 20_000), st.sampled_from(sorted(ARRAY_DTYPES)))
@example(5000, "bfloat16")
def test_a_planned_layout_can_be_stored_in_every_type(numel: int, dtype: str) -> None:
    layout = StateLayout.plan([], numel=numel)
    form = ArrayFormat(
        dtype=dtype,
        numel=layout.numel,
        chunk_numel=layout.chunk_numel,
        tile_numel=layout.tile_numel,
    )
    assert form.tile_nbytes % BLOCK_NBYTES == 0


# --------------------------------------------------------------------------- checksums and metadata


@given(st.binary(max_size=300))
@example(b"")
@example(b"123456789")
def test_checksum_is_crc32c(data: bytes) -> None:
    google = pytest.importorskip("google_crc32c")
    value: int = google.value(data)
    assert checksum(data) == value.to_bytes(4, "little")
    assert checksum(memoryview(data)) == checksum(bytearray(data)) == checksum(data)


def test_checksum_of_the_specification() -> None:
    assert checksum(b"123456789") == (0xE3069283).to_bytes(4, "little")
    assert checksum(bytes(32)) == (0x8A9136AA).to_bytes(4, "little")


def test_checksum_is_what_zarr_writes(tmp_path: Path) -> None:
    form = make_format(numel=1024, chunk_numel=1024)
    values = random_values(form)
    (tmp_path / "zarr.json").write_text(json.dumps(form.metadata()))
    array = zarr.open(tmp_path, mode="r+")
    assert isinstance(array, zarr.Array)
    array[:] = values
    stored = (tmp_path / "c/0").read_bytes()
    index_nbytes = 16 + CHECKSUM_NBYTES
    assert stored[index_nbytes:] == values.tobytes() + checksum(values)


@pytest.mark.parametrize("dtype", ARRAY_DTYPES)
@pytest.mark.parametrize("checksums", [True, False])
def test_metadata_is_as_zarr_would_write_it(tmp_path: Path, dtype: str, checksums: bool) -> None:
    form = make_format(dtype=dtype, chunk_numel=8192, tile_numel=4096, checksums=checksums)
    (tmp_path / "zarr.json").write_text(json.dumps(form.metadata(), allow_nan=False))
    array = zarr.open(tmp_path, mode="r+")
    assert isinstance(array, zarr.Array)
    array.update_attributes({})  # zarr writes the file anew
    again = json.loads((tmp_path / "zarr.json").read_text())
    ours = form.metadata()
    assert {key: again[key] for key in ours} == ours


def test_groups_open_with_plain_zarr(tmp_path: Path) -> None:
    about = {"format": FORMAT_VERSION, "step": 3, "nested": {"list": [1, "two", None]}}
    root_path, rank_path = tmp_path / "root", tmp_path / "root" / "rank-00000"
    generation = rank_path / "gen-a"
    for path, attributes in (
        (root_path, {}),
        (rank_path, about),
        (rank_path / "COMMIT", about),
        (generation, about),
        (generation / "opt-0", {}),
    ):
        path.mkdir()
        (path / "zarr.json").write_text(json.dumps(group_metadata(attributes)))
    form = make_format()
    write_array(generation / "opt-0" / "main", form, random_values(form))
    (rank_path / "current").symlink_to("gen-a")

    # Warnings are errors here: zarr meets nothing in the tree that it does not know.
    root = zarr.open_group(root_path, mode="r")
    assert root.attrs["tierstore"] == {}
    assert [name for name, _ in root.members()] == ["rank-00000"]
    rank = root["rank-00000"]
    assert isinstance(rank, zarr.Group)
    assert rank.attrs["tierstore"] == about
    # The link counts as a generation of its own, so what walks the tree meets its arrays twice.
    assert sorted(name for name, _ in rank.members()) == ["COMMIT", "current", "gen-a"]
    for name in ("gen-a", "current"):
        main = rank[f"{name}/opt-0/main"]
        assert isinstance(main, zarr.Array)
        assert main.shape == (form.numel,)
    tree = str(root.tree())
    assert "COMMIT" in tree
    assert "main (9500,) float32" in tree


@pytest.mark.parametrize("name", ["COMMIT", ".lease", "zarr.json.tmp"])
def test_zarr_warns_of_files_that_it_does_not_know(tmp_path: Path, name: str) -> None:
    """Why every record of a tree is a group: a reader would be told of any other file."""
    (tmp_path / "zarr.json").write_text(json.dumps(group_metadata({})))
    (tmp_path / name).write_text("{}")
    with pytest.warns(UserWarning, match=f"Object at {name} is not recognized"):
        assert list(zarr.open_group(tmp_path, mode="r").members()) == []

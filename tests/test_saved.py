"""Stores at rest: read with checks, from files and through fsspec, and what fills other arrays."""

from __future__ import annotations

import json
import os
import shutil
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.test_reshard import Arrays, Job, flat, make_job, make_model, make_topology
from tierstore import _saved_files
from tierstore.backends import _placement
from tierstore.backends.posix import PosixStore
from tierstore.config import TierConfig
from tierstore.copies import SourceId
from tierstore.device import CpuDevice
from tierstore.errors import (
    BackendUnavailableError,
    ConfigError,
    CorruptError,
    LayoutError,
    TierStoreError,
    TransferError,
)
from tierstore.filling import Filling, fill_from
from tierstore.layout import StateLayout
from tierstore.records import Identity, OptimizerLayout
from tierstore.saved import SavedStore
from tierstore.zarr_format import ARRAY_DTYPES

# They have no type information.
fsspec: Any = import_module("fsspec")
memory_files: Any = import_module("fsspec.implementations.memory").MemoryFileSystem

NAMES = ("main", "exp_avg", "exp_avg_sq")
FLOATS = dict.fromkeys(NAMES, "float32")
ROOT = "train-0badcafe"


def tensors(entry: OptimizerLayout, arrays: Arrays, tile: int) -> dict[str, torch.Tensor]:
    """A tile: the number of each element, plus 1000000 for each further array."""
    found = {}
    place = entry.layout.tile(tile)
    for index, (name, dtype) in enumerate(entry.arrays.items()):
        values = np.zeros(entry.layout.tile_numel)
        numbers = arrays.values[place.start : place.start + place.numel]
        values[: place.numel] = np.where(numbers > 0, numbers + 1_000_000 * index, 0)
        found[name] = torch.from_numpy(values).to(getattr(torch, dtype))
    return found


def write_job(
    directory: Path,
    job: Job,
    *,
    step: int = 7,
    counters: Callable[[SourceId], Any] = lambda source: None,
    arrays: Mapping[str, str] = FLOATS,
    after: Callable[[PosixStore], None] = lambda store: None,
    **options: Any,
) -> Path:
    """Write a job as real stores; returns the root."""
    options = {"directories": (directory,), "slots": 2, **options}
    ranks = sorted({source.rank for source in job})
    for rank in ranks:
        sources = [source for source in job if source.rank == rank]
        entries = {
            source: OptimizerLayout(name=source.optimizer, layout=job[source].layout, arrays=arrays)
            for source in sources
        }
        identity = Identity(nonce="0badcafe", rank=rank, topology={"world_size": len(ranks)})
        with PosixStore(TierConfig(tier="nvme", **options), CpuDevice(), identity) as store:
            store.allocate(list(entries.values()))
            store.begin()
            for source, entry in entries.items():
                for tile in range(entry.layout.n_tiles):
                    values = tensors(entry, job[source], tile)
                    store.write_tile(entry.name, tile, values).settled.result(timeout=60)
            store.commit(step, {source.optimizer: counters(source) for source in sources})
            after(store)
    return directory / ROOT


def one_rank(numel: int = 5000, **options: Any) -> Job:
    """One vector, in tiles of 1024 and chunks of 2048 elements."""
    options = {"tile_numel": 1024, "chunk_numel": 2048, **options}
    layout = StateLayout.plan([flat("p", numel)], **options)
    return {SourceId(0, "opt-0"): Arrays(layout, np.arange(1, numel + 1))}


def halves(numel: int = 5000) -> Job:
    """The same on two ranks."""
    job = {}
    for rank, (low, high) in enumerate([(0, 3000), (3000, numel)]):
        shard = flat("p", high - low, local_shape=(numel,), param_start=low)
        pieces = flat("p", numel).pieces
        layout = StateLayout.plan(
            [replace(shard, pieces=pieces)], tile_numel=1024, chunk_numel=2048
        )
        job[SourceId(rank, "opt-0")] = Arrays(layout, np.arange(low + 1, high + 1))
    return job


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_job(tmp_path, one_rank())


@pytest.fixture
def memory() -> Iterator[Any]:
    found = fsspec.filesystem("memory")
    yield found
    found.rm("/", recursive=True)


def upload(memory: Any, root: Path, below: str = "/stores") -> str:
    for path in sorted(root.rglob("*")):
        if path.is_file() and not path.is_symlink():
            memory.pipe_file(f"{below}/{path.relative_to(root)}", path.read_bytes())
    return f"memory://{below}"


def edit(path: Path, change: Callable[[Any], Any]) -> None:
    """Change the tierstore attributes in a zarr.json."""
    about = json.loads(path.read_text())
    attributes = about["attributes"]["tierstore"]
    about["attributes"]["tierstore"] = change(attributes) or attributes
    path.write_text(json.dumps(about))


class ReadBytes:
    """Counts the bytes of chunk files that are asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: Counter[tuple[str, int]] = Counter()
        self.nbytes = 0
        for kind in (_saved_files.LocalFiles, _saved_files.RemoteFiles):
            monkeypatch.setattr(kind, "read", self._counted(kind.read))

    def _counted(self, read: Callable[..., bytes]) -> Callable[..., bytes]:
        def counted(files: Any, path: str, start: int, nbytes: int) -> bytes:
            if not path.endswith(".json"):
                self.calls[path, start] += 1
                self.nbytes += nbytes
            return read(files, path, start, nbytes)

        return counted


# ------------------------------------------------------------------------------------------ reading


def test_what_a_store_says_of_itself(root: Path) -> None:
    saved = SavedStore(root)
    assert (saved.step, list(saved.ranks), str(saved)) == (7, [0], str(root))
    rank = saved.ranks[0]
    assert (rank.identity.nonce, rank.group) == ("0badcafe", "gen-a")
    assert rank.commit.state == {"opt-0": None}
    (entry,) = saved.optimizers().values()
    assert entry.layout == one_rank()[SourceId(0, "opt-0")].layout
    assert dict(entry.arrays) == FLOATS


@pytest.mark.parametrize("kind", ["path", "text", "file://", "memory://"])
def test_any_range_is_read(root: Path, memory: Any, kind: str) -> None:
    location: Any = {
        "path": root,
        "text": str(root),
        "file://": f"file://{root}",
        "memory://": upload(memory, root),
    }[kind]
    saved = SavedStore(location, cache_tiles=2)
    array = saved.array(0, "opt-0", "exp_avg")
    assert (array.dtype, array.layout.numel) == ("float32", 5000)
    assert array.numpy_dtype == np.dtype("<f4")
    whole = np.arange(1, 5001) + 1_000_000
    for start in (0, 1, 1023, 1024, 2047, 4095, 4999):
        for numel in (0, 1, 2, 1025, 5000 - start):
            numel = min(numel, 5000 - start)
            found = array.read(start, numel)
            assert found.dtype == np.float32
            assert (found == whole[start : start + numel]).all()
    assert array.read(5000, 0).size == 0
    for start, numel in ((-1, 1), (0, -1), (5000, 1), (0, 5001), (0, 10**18)):
        with pytest.raises(LayoutError, match="which has 5000"):
            array.read(start, numel)


@pytest.mark.parametrize("remote", [False, True])
def test_ten_elements_cost_one_tile(
    root: Path, memory: Any, monkeypatch: pytest.MonkeyPatch, remote: bool
) -> None:
    array = SavedStore(upload(memory, root) if remote else root).array(0, "opt-0", "main")
    read = ReadBytes(monkeypatch)
    assert array.read(2500, 10).tolist() == list(range(2501, 2511))
    assert array.read(2600, 10)[0] == 2601
    assert (len(read.calls), read.nbytes) == (1, 4096 + 4)
    assert array.read(1020, 10)[0] == 1021
    assert len(read.calls) == 3


def test_no_more_tiles_are_held_than_was_said(tmp_path: Path) -> None:
    numel = 64 * 65536
    root = write_job(tmp_path, one_rank(numel, tile_numel=65536, chunk_numel=65536 * 8))
    saved = SavedStore(root, cache_tiles=3)
    array = saved.array(0, "opt-0", "main")
    array.read(0, 10)
    tracemalloc.start()
    try:
        for start in range(0, numel, 50_000):
            array.read(start, min(100, numel - start))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 3.5 * 65536 * 4
    assert len(saved._cache) == 3


@pytest.mark.parametrize(
    ("dtype", "numpy_dtype"), [("bfloat16", "<u2"), ("float8_e4m3fn", "u1"), ("float16", "<f2")]
)
def test_narrow_types_come_as_bits(tmp_path: Path, dtype: str, numpy_dtype: str) -> None:
    job = one_rank(9000, tile_numel=4096, chunk_numel=4096)
    root = write_job(tmp_path, job, arrays={"main": dtype})
    array = SavedStore(root).array(0, "opt-0", "main")
    found = array.read(4000, 3000)
    assert (array.dtype, found.dtype) == (dtype, np.dtype(numpy_dtype))
    kind = getattr(torch, dtype)
    wanted = torch.arange(4001, 7001, dtype=torch.float64).to(kind)
    assert found.tobytes() == wanted.view(torch.uint8).numpy().tobytes()
    (target,) = SavedStore(root).optimizers().values()
    tiles = [arrays["main"] for _, arrays in fill_from(SavedStore(root), target)]
    assert np.concatenate(tiles).tobytes() == array.read(0, 9000).tobytes()


def test_tiles_are_read_only(root: Path) -> None:
    tile = SavedStore(root).array(0, "opt-0", "main").tile(4)
    assert tile.size == 5000 - 4096
    with pytest.raises(ValueError, match="read-only"):
        tile[0] = 1


def test_the_last_committed_generation_is_read(tmp_path: Path) -> None:
    def step_again(store: PosixStore) -> None:
        store.begin()
        entry = store.optimizers["opt-0"]
        for tile in range(entry.layout.n_tiles):
            out = {name: torch.full((entry.layout.tile_numel,), 8.0) for name in NAMES}
            store.write_tile("opt-0", tile, out).settled.result(timeout=60)
        store.commit(8, {})

    saved = SavedStore(write_job(tmp_path, one_rank(), after=step_again))
    assert (saved.step, saved.ranks[0].group) == (8, "gen-b")
    assert set(saved.array(0, "opt-0", "main").read(0, 5000).tolist()) == {8.0}


def test_a_frozen_generation_and_a_snapshot_are_read(tmp_path: Path) -> None:
    root = write_job(
        tmp_path / "live", one_rank(), after=lambda store: store.snapshot(tmp_path / "snapshot")
    )
    snapshot = SavedStore(tmp_path / "snapshot")
    assert (snapshot.step, snapshot.array(0, "opt-0", "main").read(9, 1)[0]) == (7, 10.0)

    rank = root / "rank-00000"
    shutil.copytree(rank / "gen-a", rank / "frozen" / "step-00000007")
    edit(rank / "gen-a" / "zarr.json", lambda about: {"state": "writing"})
    with pytest.raises(CorruptError, match=r"gen-a is not a whole step: .* 'writing'"):
        SavedStore(root)
    saved = SavedStore(root, frozen="step-00000007")
    assert (saved.step, saved.ranks[0].group) == (7, "frozen/step-00000007")
    assert saved.array(0, "opt-0", "exp_avg").read(4998, 2).tolist() == [1004999, 1005000]
    with pytest.raises(CorruptError, match="missing"):
        SavedStore(root, frozen="step-00000008")
    for name in ("../gen-a", ".", "", "a/b", "x" * 65):
        with pytest.raises(ConfigError, match="can't be the name"):
            SavedStore(root, frozen=name)


# ------------------------------------------------------------------------------- what is not whole


@pytest.mark.parametrize("place", [17, 4096 + 2])
def test_a_flipped_bit_is_named_and_its_neighbours_are_read(root: Path, place: int) -> None:
    array = SavedStore(root).array(0, "opt-0", "exp_avg")
    path = root / "rank-00000/gen-a/opt-0/exp_avg/c/1"
    with path.open("r+b") as file:
        file.seek(4096 + 8192 + place)  # tile 3 is the second one of chunk 1
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))
    assert array.read(2048, 1024)[0] == 1_002_049
    with pytest.raises(CorruptError, match=rf"tile 3 of opt-0/exp_avg \(byte 12288 of {path}\)"):
        array.read(3000, 200)


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda path: path.unlink(), "c/1 is missing"),
        (lambda path: os.truncate(path, path.stat().st_size - 1), "20,479 bytes and not 20,480"),
        (lambda path: os.truncate(path, 30_000), "30,000 bytes and not"),
    ],
    ids=["missing", "short", "long"],
)
def test_a_chunk_file_that_is_not_whole(
    root: Path,
    memory: Any,
    break_it: Callable[[Path], None],
    message: str,
    remote: bool,
) -> None:
    break_it(root / "rank-00000/gen-a/opt-0/main/c/1")
    location = upload(memory, root) if remote else root
    with pytest.raises(CorruptError, match=message):
        SavedStore(location)
    array = SavedStore(location, check_files=False).array(0, "opt-0", "main")
    assert array.read(0, 2048)[-1] == 2048
    with pytest.raises(CorruptError, match=message):
        array.read(0, 2049)


def test_a_file_that_shrinks_while_it_is_open_is_an_error(root: Path) -> None:
    array = SavedStore(root).array(0, "opt-0", "main")
    array.read(1024, 10)
    os.truncate(root / "rank-00000/gen-a/opt-0/main/c/0", 6000)
    with pytest.raises(CorruptError, match="ends at byte 6000"):
        array.read(0, 10)


def set_rank(key: str, value: Any) -> Callable[[Path], None]:
    return lambda root: edit(root / "rank-00000/zarr.json", lambda about: about | {key: value})


def set_record(key: str, value: Any) -> Callable[[Path], None]:
    return lambda root: edit(
        root / "rank-00000/gen-a/zarr.json", lambda about: about | {key: value}
    )


def set_commit(key: str, value: Any) -> Callable[[Path], None]:
    return lambda root: edit(
        root / "rank-00000/COMMIT/zarr.json", lambda about: about | {key: value}
    )


def set_optimizer(key: str, value: Any) -> Callable[[Path], None]:
    def change(about: dict[str, Any]) -> None:
        about["optimizers"][0][key] = value

    return lambda root: edit(root / "rank-00000/zarr.json", change)


def set_layout(key: str, value: Any) -> Callable[[Path], None]:
    def change(about: dict[str, Any]) -> None:
        about["optimizers"][0]["layout"][key] = value

    return lambda root: edit(root / "rank-00000/zarr.json", change)


WRONG: list[tuple[Callable[[Path], Any], str]] = [
    (lambda root: (root / "zarr.json").unlink(), "zarr.json is missing"),
    (lambda root: (root / "zarr.json").write_text("{"), "not readable as JSON"),
    (lambda root: (root / "zarr.json").write_text("[" * 10**5), "not readable as JSON"),
    (lambda root: (root / "zarr.json").write_bytes(b"\xff"), "not readable as JSON"),
    (lambda root: (root / "zarr.json").write_text("[]"), "no tierstore attributes"),
    (
        lambda root: (root / "zarr.json").write_text('{"attributes": {"tierstore": 1}}'),
        "no tierstore attributes",
    ),
    (lambda root: edit(root / "zarr.json", lambda about: {"part_of": "/x"}), "open that"),
    (lambda root: shutil.rmtree(root / "rank-00000"), "no rank"),
    (lambda root: (root / "rank-00000/zarr.json").unlink(), "is missing"),
    (lambda root: (root / "rank-00000/COMMIT/zarr.json").unlink(), "is missing"),
    (
        lambda root: edit(root / "rank-00000/COMMIT/zarr.json", lambda about: {"x": 1}),
        "committed nothing",
    ),
    (lambda root: (root / "rank-00000/gen-a/opt-0/main/zarr.json").unlink(), "is missing"),
    (
        lambda root: (root / "rank-00000/gen-a/opt-0/main/zarr.json").write_text("[]"),
        "zarr_format, .* are not as",
    ),
    (set_rank("format", 2), "has format 2"),
    (set_rank("rank", 1), "says that it is rank 1"),
    (set_rank("rank", -1), "not a rank's group"),
    (set_rank("rank", True), "not a rank's group"),
    (set_rank("optimizers", 7), "not a rank's group"),
    (set_rank("optimizers", [{}]), "not a rank's group"),
    (set_rank("topology", []), "not a rank's group"),
    (set_rank("topology", {"world_size": "1"}), "not a rank's group"),
    (set_rank("topology", {"world_size": 3}), "1 ranks of a job of 3; missing: 1, 2"),
    (set_rank("topology", {"world_size": 10**30}), "1 ranks of a job of 1000"),
    (set_rank("nonce", "other"), "written by run '0badcafe'"),
    (set_optimizer("places", [0, 0]), "not a rank's group"),
    (set_optimizer("places", [0, 0, -1]), "not a rank's group"),
    (set_optimizer("places", "000"), "not a rank's group"),
    (set_optimizer("name", "../x"), "can't be the name"),
    (set_optimizer("name", 1), "not a rank's group"),
    (set_optimizer("arrays", {"../../x": "float32"}), "can't be the name"),
    (set_optimizer("arrays", {"main": "float64"}), "can't be stored"),
    (set_optimizer("arrays", {"main": ["float32"]}), "not a rank's group"),
    (set_layout("numel", 10**15), "not a rank's group"),
    (set_layout("numel", 6000), "shape are not as"),
    (set_layout("tile_numel", 2048), "codecs are not as"),
    (set_record("step", 8), "record says 'complete', step 8, and COMMIT names step 7"),
    (set_record("step", "7"), "COMMIT names"),
    (set_record("state", "writing"), "says 'writing'"),
    (set_record("counters", 7), "not a rank's group"),
    (set_commit("step", None), "COMMIT names step None"),
    (set_commit("generation", "gen-b"), "gen-b is not a whole step: .* 'writing'"),
    (set_commit("generation", "../../x"), "committed nothing"),
    (set_commit("generation", []), "committed nothing"),
]


@pytest.mark.parametrize(("break_it", "message"), WRONG, ids=map(str, range(len(WRONG))))
def test_metadata_that_is_not_right_is_a_typed_error(
    root: Path, break_it: Callable[[Path], Any], message: str
) -> None:
    break_it(root)
    tracemalloc.start()
    try:
        with pytest.raises(TierStoreError, match=message):
            SavedStore(root)
        assert tracemalloc.get_traced_memory()[1] < 4_000_000
    finally:
        tracemalloc.stop()


def test_huge_sizes_that_all_metadata_agree_on_cost_no_memory(root: Path) -> None:
    def grow(about: dict[str, Any]) -> None:
        entry = about["optimizers"][0]
        numel = 3 * 199_999_488
        entry["layout"] |= {
            "numel": numel,
            "tile_numel": 199_999_488,
            "chunk_numel": 199_999_488,
            "shards": [],
        }

    edit(root / "rank-00000/zarr.json", grow)
    array = SavedStore(root, check_files=False).array(0, "opt-0", "main")
    tracemalloc.start()
    try:
        with pytest.raises(CorruptError, match="bytes and not 800,"):
            array.read(0, 3 * 199_999_488)
        with pytest.raises(CorruptError, match="bytes and not 800,"):
            array.tile(0)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_ranks_must_be_all_there_of_one_run_and_step(tmp_path: Path) -> None:
    root = write_job(tmp_path, halves())
    saved = SavedStore(root)
    assert sorted(saved.ranks) == [0, 1]
    assert saved.array(1, "opt-0", "main").read(0, 2).tolist() == [3001, 3002]
    with pytest.raises(LayoutError, match="no array opt-0/main of rank 2"):
        saved.array(2, "opt-0", "main")

    shutil.copytree(root, tmp_path / "lost" / ROOT, symlinks=True)
    shutil.rmtree(tmp_path / "lost" / ROOT / "rank-00000")
    with pytest.raises(CorruptError, match="1 ranks of a job of 2; missing: 0, highest: 1"):
        SavedStore(tmp_path / "lost" / ROOT)

    later = tmp_path / "later" / ROOT
    shutil.copytree(root, later, symlinks=True)
    edit(later / "rank-00001/COMMIT/zarr.json", lambda about: about | {"step": 8})
    edit(later / "rank-00001/gen-a/zarr.json", lambda about: about | {"step": 8})
    with pytest.raises(CorruptError, match=r"step 7 on \[0\], step 8 on \[1\]"):
        SavedStore(later)

    other = tmp_path / "other" / ROOT
    shutil.copytree(root, other, symlinks=True)
    for path in ("zarr.json", "COMMIT/zarr.json", "gen-a/zarr.json"):
        edit(other / "rank-00001" / path, lambda about: about | {"nonce": "f00"})
    with pytest.raises(CorruptError, match="ranks of different runs"):
        SavedStore(other)


def test_errors_of_the_file_system_are_typed(root: Path, tmp_path: Path) -> None:
    with pytest.raises(CorruptError, match=r"nowhere/zarr\.json is missing"):
        SavedStore(tmp_path / "nowhere")
    (tmp_path / "file").write_text("x")
    with pytest.raises(TransferError, match="Not a directory"):
        SavedStore(tmp_path / "file")
    with pytest.raises(CorruptError, match="is missing"):
        SavedStore("memory://nowhere")
    with pytest.raises(ConfigError, match="no URL that fsspec can open"):
        SavedStore("nonsense://x/y")
    path = root / "rank-00000/gen-a/opt-0/main/c/0"
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(CorruptError, match="is not a file"):
        SavedStore(root)
    with pytest.raises(ConfigError, match="one tile is the least"):
        SavedStore(root, cache_tiles=0)


def test_a_missing_driver_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_driver(*_: Any, **__: Any) -> Any:
        raise ImportError("install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", no_driver)
    with pytest.raises(BackendUnavailableError, match="install s3fs"):
        SavedStore("s3://bucket/store")


def test_what_fsspec_raises_is_a_transfer_error(
    root: Path, memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    array = SavedStore(upload(memory, root)).array(0, "opt-0", "main")

    def refuse(*_: Any, **__: Any) -> bytes:
        raise RuntimeError("throttled")

    monkeypatch.setattr(memory_files, "cat_file", refuse)
    with pytest.raises(TransferError, match="main/c/0: throttled"):
        array.read(0, 1)
    monkeypatch.setattr(memory_files, "cat_file", lambda *_, **__: b"short")
    with pytest.raises(CorruptError, match="too early"):
        array.read(0, 1)


# --------------------------------------------------------------------------------- links and drives


@pytest.mark.parametrize("below", ["rank-00000", "gen-a", "gen-a/opt-0/main/c", "gen-a/zarr.json"])
def test_no_link_below_the_root_is_followed(root: Path, tmp_path: Path, below: str) -> None:
    path = root / below if below.startswith("rank") else root / "rank-00000" / below
    path.rename(tmp_path / "moved")
    path.symlink_to(tmp_path / "moved")
    for location in (root, f"file://{root}", f"local://{root}"):
        with pytest.raises(ConfigError, match="links are not followed"):
            SavedStore(location)


def test_the_root_itself_may_be_named_by_a_link(root: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(root)
    assert SavedStore(tmp_path / "link").array(0, "opt-0", "main").read(0, 1)[0] == 1


def test_chunks_on_other_drives_need_their_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: Any
) -> None:
    monkeypatch.setattr(_placement, "measure", lambda directories: [1e9] * len(directories))
    drives = tuple(tmp_path / letter for letter in "abc")
    job = one_rank(20_000)
    root = write_job(drives[0], job, directories=drives)
    assert any(path.is_symlink() for path in root.rglob("c/*"))
    with pytest.raises(ConfigError, match="name the further ones"):
        SavedStore(root)
    with pytest.raises(ConfigError, match="chunks in 3 directories, and 1 further ones"):
        SavedStore(root, directories=drives[1:2])
    with pytest.raises(CorruptError, match="is missing"):
        SavedStore(root, directories=(drives[2], drives[1]))
    saved = SavedStore(root, directories=drives[1:])
    assert saved.array(0, "opt-0", "main").read(0, 20_000).tolist() == list(range(1, 20_001))
    # What a link says is never asked: not even where it leads elsewhere.
    link = next(path for path in root.rglob("c/*") if path.is_symlink())
    link.unlink()
    link.symlink_to("/dev/zero")
    SavedStore(root, directories=drives[1:]).array(0, "opt-0", "main").read(0, 20_000)
    with pytest.raises(ConfigError, match="open that"):
        SavedStore(drives[1] / ROOT)
    link.unlink()
    shutil.copytree(drives[0], tmp_path / "copy", symlinks=True)
    for path in (path for drive in drives[1:] for path in drive.rglob("c/*")):
        place = tmp_path / "copy" / path.relative_to(path.parents[6])
        place.unlink(missing_ok=True)
        shutil.copy(path, place)
    copied = SavedStore(tmp_path / "copy" / ROOT)
    assert copied.array(0, "opt-0", "main").read(19_990, 10)[-1] == 20_000
    with pytest.raises(ConfigError, match="can't have further directories"):
        SavedStore(upload(memory, tmp_path / "copy" / ROOT), directories=drives[1:])


# ---------------------------------------------------------------------------------------- filling


def wanted_tiles(filling: Filling, entry: OptimizerLayout, arrays: Arrays) -> None:
    """Compare every element, padding too."""
    count = 0
    for tile, found in filling:
        wanted = tensors(entry, arrays, tile.index)
        assert list(found) == list(entry.arrays)
        for name, values in found.items():
            assert values.shape == (tile.numel,)
            assert values.tobytes() == wanted[name][: tile.numel].numpy().tobytes()
        count += 1
    assert count == entry.layout.n_tiles


@pytest.mark.parametrize("seed", range(6))
def test_stores_of_one_topology_fill_arrays_of_another(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    model = make_model(rng)
    saved_job, job = (make_job(model, make_topology(rng), rng) for _ in range(2))
    saved = SavedStore(write_job(tmp_path, saved_job), cache_tiles=3)
    for target, arrays in job.items():
        entry = OptimizerLayout(name=target.optimizer, layout=arrays.layout, arrays=FLOATS)
        wanted_tiles(fill_from(saved, entry, rank=target.rank), entry, arrays)


@pytest.mark.parametrize("wanted", ARRAY_DTYPES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_moments_of_another_type_are_converted(tmp_path: Path, dtype: str, wanted: str) -> None:
    kinds = {"main": "float32", "exp_avg": dtype}
    ((source, arrays),) = one_rank(10_000, tile_numel=4096, chunk_numel=8192).items()
    saved = SavedStore(write_job(tmp_path, {source: arrays}, arrays=kinds))
    entry = OptimizerLayout(
        name="opt-0", layout=arrays.layout, arrays={"main": "float32", "exp_avg": wanted}
    )
    before = OptimizerLayout(name="opt-0", layout=arrays.layout, arrays=kinds)
    for tile, found in fill_from(saved, entry):
        values = tensors(before, arrays, tile.index)["exp_avg"][: tile.numel]
        same = values.to(getattr(torch, wanted)).view(torch.uint8).numpy()
        assert found["exp_avg"].tobytes() == same.tobytes()
        assert found["exp_avg"].itemsize == ARRAY_DTYPES[wanted].itemsize


def test_it_goes_through_memory_too(tmp_path: Path, memory: Any) -> None:
    url = upload(memory, write_job(tmp_path, halves()))
    (target, arrays), *_ = one_rank().items()
    entry = OptimizerLayout(name="opt-0", layout=arrays.layout, arrays=FLOATS)
    wanted_tiles(fill_from(SavedStore(url), entry, rank=target.rank), entry, arrays)


def test_each_saved_tile_is_read_once_where_the_order_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = SavedStore(write_job(tmp_path, halves()))
    arrays = one_rank()[SourceId(0, "opt-0")]
    entry = OptimizerLayout(name="opt-0", layout=arrays.layout, arrays=FLOATS)
    read = ReadBytes(monkeypatch)
    wanted_tiles(fill_from(saved, entry), entry, arrays)
    assert set(read.calls.values()) == {1}
    assert len(read.calls) == 3 * (3 + 2)


def test_filling_holds_tiles_and_never_shards(tmp_path: Path) -> None:
    numel = 100 * 16384
    job = one_rank(numel, tile_numel=16384, chunk_numel=16384 * 20)
    saved = SavedStore(write_job(tmp_path, job), cache_tiles=6)
    entry = OptimizerLayout(
        name="opt-0",
        layout=StateLayout.plan([flat("p", numel)], tile_numel=16384 // 2),
        arrays=FLOATS,
    )
    filling = fill_from(saved, entry)
    filling.tile(0)
    tracemalloc.start()
    try:
        for _, arrays in filling:
            del arrays
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 6 * 65536 + 2 * 3 * 32768 + 100_000


def test_what_can_not_fill_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    saved = SavedStore(write_job(tmp_path, one_rank(), arrays={"main": "float32"}))
    same = StateLayout.plan([flat("p", 5000)])
    more = StateLayout.plan([flat("p", 5000), flat("q", 3, 5000)])
    for layout, arrays, message in (
        (same, FLOATS, "no array opt-0/exp_avg of rank 0"),
        (same, {"main": "float16"}, "is float32, and opt-0/main is to be float16"),
        (more, {"main": "float32"}, "nobody saved 3 elements of 1 parameters: q"),
    ):
        entry = OptimizerLayout(name="opt-0", layout=layout, arrays=arrays)
        with pytest.raises(LayoutError, match=message):
            fill_from(saved, entry)


def test_of_copies_that_of_the_same_rank_fills(tmp_path: Path) -> None:
    (arrays,) = one_rank().values()
    job = {
        SourceId(rank, "opt-0"): Arrays(arrays.layout, arrays.values + 10_000 * rank)
        for rank in range(3)
    }
    saved = SavedStore(write_job(tmp_path, job))
    for target, wanted in job.items():
        entry = OptimizerLayout(name="opt-0", layout=wanted.layout, arrays=FLOATS)
        wanted_tiles(fill_from(saved, entry, rank=target.rank), entry, wanted)


def test_parameters_without_pieces_fill_the_same_place_only(tmp_path: Path) -> None:
    layout = StateLayout.plan([flat("odd", 3000, pieces=())])
    arrays = Arrays(layout, np.arange(1, 3001))
    saved = SavedStore(write_job(tmp_path, {SourceId(0, "opt-0"): arrays}))
    entry = OptimizerLayout(name="opt-0", layout=layout, arrays=FLOATS)
    wanted_tiles(fill_from(saved, entry), entry, arrays)
    wanted_tiles(fill_from(saved, entry, rank=0, topology={"world_size": 1}), entry, arrays)
    for rank, topology in ((0, {"world_size": 2}), (1, {"world_size": 1})):
        with pytest.raises(LayoutError, match="odd can be loaded only on the topology"):
            fill_from(saved, entry, rank=rank, topology=topology)


# --------------------------------------------------------------------------------------- counters


def counted(tmp_path: Path, job: Job, counters: Callable[[SourceId], Any]) -> SavedStore:
    return SavedStore(write_job(tmp_path, job, counters=counters))


def scalars(*runs: list[Any], groups: Any = ({"step": 4},)) -> dict[str, Any]:
    return {"groups": list(groups), "scalars": {"step": list(runs)}}


def two_and_two() -> Job:
    """Each of two ranks holds its half of `p` and a whole parameter of its own."""
    job = {}
    for source, arrays in halves().items():
        (shard,) = arrays.layout.shards
        own = flat(f"own{source.rank}", 10, shard.numel)
        layout = StateLayout.plan([shard, own], tile_numel=1024, chunk_numel=2048)
        more = np.arange(10) + 10_001 + 10 * source.rank
        job[source] = Arrays(layout, np.concatenate([arrays.values, more]))
    return job


def target_of(*names: str) -> OptimizerLayout:
    sizes = {"p": 5000}
    shards, end = [], 0
    for name in names:
        numel = sizes.get(name, 10)
        shards.append(flat(name, numel, end))
        end += numel
    return OptimizerLayout(name="opt-0", layout=StateLayout.plan(shards), arrays=FLOATS)


def test_counters_follow_the_parameters(tmp_path: Path) -> None:
    saved = counted(
        tmp_path,
        two_and_two(),
        lambda source: scalars(
            [4.0, 1], [9.0 if source.rank else 4.0, 1], groups=[{}, {"step": 4}]
        ),
    )
    filling = fill_from(saved, target_of("own1", "p", "own0"))
    assert filling.scalars() == [{"step": 9.0}, {"step": 4.0}, {"step": 4.0}]
    assert filling.group() == {"step": 4}
    assert filling.counters(2) == {
        "groups": [{"step": 4}, {"step": 4}],
        "scalars": {"step": [[9.0, 1], [4.0, 2]]},
    }


def test_counters_that_disagree_name_the_parameter(tmp_path: Path) -> None:
    saved = counted(
        tmp_path,
        two_and_two(),
        lambda source: scalars(
            [4.0 + source.rank, 1], [4.0, 1], groups=[{"step": 4 + source.rank}]
        ),
    )
    filling = fill_from(saved, target_of("own0", "p"))
    with pytest.raises(
        LayoutError, match=r"p was .* \{'step': 4.0\} on rank 0 opt-0; \{'step': 5.0\} on rank 1"
    ):
        filling.counters(1)
    with pytest.raises(LayoutError, match="different steps: 4 on rank 0 opt-0, 5 on rank 1"):
        filling.group()
    assert fill_from(saved, target_of("own0")).group() == {"step": 4}


def test_optimizers_without_scalars_have_none(tmp_path: Path) -> None:
    saved = counted(tmp_path, one_rank(), lambda source: {"groups": [{}], "scalars": {}})
    filling = fill_from(saved, target_of("p"))
    assert filling.counters(1) == {"groups": [{}], "scalars": {}}


def test_a_shard_without_elements_counts_as_its_namesakes(tmp_path: Path) -> None:
    saved = counted(tmp_path, one_rank(), lambda source: scalars([4.0, 1]))
    (shard,) = one_rank()[SourceId(0, "opt-0")].layout.shards
    empty = [replace(shard, numel=0, name=name) for name in ("p", "q")]
    entries = [
        OptimizerLayout(name="opt-0", layout=StateLayout.plan([entry]), arrays=FLOATS)
        for entry in empty
    ]
    assert fill_from(saved, entries[0]).counters(1)["scalars"] == {"step": [[4.0, 1]]}
    assert list(fill_from(saved, entries[0])) == []
    with pytest.raises(LayoutError, match="q was saved with no one set of scalars"):
        fill_from(saved, entries[1]).scalars()


NO_COUNTERS: list[Any] = [
    None,
    7,
    {},
    {"groups": 7, "scalars": 7},
    {"groups": [7], "scalars": {"step": 7}},
    {"groups": [{"step": "x"}], "scalars": {"step": [7]}},
    {"groups": [{"step": []}], "scalars": {"step": [[4.0]]}},
    scalars([4.0, 2], groups=[None]),
    scalars([4.0, 10**12], groups=[[1]]),
    scalars([4.0, 2], [4.0, -1], groups=[{"step": None}]),
    scalars(["x", 1], groups=["step"]),
    scalars([4.0, 1.0], groups={"step": 7}),
]


@pytest.mark.parametrize("wrong", NO_COUNTERS, ids=map(str, range(len(NO_COUNTERS))))
def test_counters_that_are_none_are_a_typed_error(tmp_path: Path, wrong: Any) -> None:
    filling = fill_from(counted(tmp_path, one_rank(), lambda source: wrong), target_of("p"))
    with pytest.raises(CorruptError, match="rank 0 opt-0"):
        filling.scalars()
    with pytest.raises(CorruptError, match="rank 0 opt-0"):
        filling.group()

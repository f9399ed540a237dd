"""State at rest by parameter: any topology, any index, no more tiles than needed, no torch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import zarr

from tests.test_reshard import flat, make_job, make_model, make_topology
from tests.test_saved import NAMES, ReadBytes, edit, halves, one_rank, upload, write_job
from tierstore import inspection
from tierstore.copies import SourceId
from tierstore.errors import BackendUnavailableError, CorruptError, LayoutError

ROOT = Path(__file__).resolve().parent.parent
fsspec: Any = import_module("fsspec")


@pytest.fixture
def memory() -> Iterator[Any]:
    found = fsspec.filesystem("memory")
    yield found
    found.rm("/", recursive=True)


def counted(source: SourceId) -> Any:
    return {"groups": [{}], "scalars": {"step": [[7.0, 1]]}}


# ---------------------------------------------------------------------------------- every parameter


@pytest.mark.parametrize("seed", range(4))
def test_every_parameter_is_put_together_from_all_ranks(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    model = make_model(rng)
    state = inspection.open(write_job(tmp_path, make_job(model, make_topology(rng), rng)))
    assert list(state) == sorted(model.tensors)
    for key, numbers in model.tensors.items():
        parameter = state[key]
        assert (parameter.global_shape, parameter.missing_numel) == (numbers.shape, 0)
        for index, name in enumerate(NAMES):
            found = np.asarray(parameter.arrays[name])
            assert (found == numbers + 1_000_000 * index).all()
            assert (found.shape, found.dtype.name) == (numbers.shape, "float32")
        blocks = list(parameter.main.blocks(37))
        assert max(part.size for _, part in blocks) <= 37
        assert (np.concatenate([part for _, part in blocks]) == numbers.reshape(-1)).all()
        assert [start for start, _ in blocks] == list(range(0, numbers.size, 37))


def test_any_index_gives_what_numpy_gives(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    model = make_model(rng)
    state = inspection.open(write_job(tmp_path, make_job(model, make_topology(rng), rng)))
    key = "layers.fc1"
    numbers, array = model.tensors[key], state[key].main
    n, rows, columns = numbers.shape
    for index in (
        (),
        ...,
        0,
        -1,
        np.int64(2),
        slice(1, 3),
        slice(None, None, -1),
        slice(3, 0, -2),
        slice(2, 2),
        (1, 2),
        (1, -2, columns - 1),
        (..., 0),
        (slice(1, None), ..., slice(0, 1)),
        (0, slice(rows - 1, 0, -3)),
        (slice(None), slice(1, rows, 2), slice(None, None, 2)),
        (0, ..., slice(5, 2)),
    ):
        found = array[index]
        assert np.array_equal(found, numbers[index]), index
        assert np.shape(found) == np.shape(numbers[index]), index
    wrong: Any
    for wrong in (n, -n - 1, (0, 0, 0, 0), (..., ...), 1.0, True, None, [0, 1], np.ones(3, bool)):
        with pytest.raises(IndexError):
            array[wrong]
    assert len(array) == n
    assert (array.ndim, array.size, array.nbytes) == (3, numbers.size, 4 * numbers.size)
    assert state["scale"].main[()] == model.tensors["scale"]
    with pytest.raises(TypeError, match="has no axis"):
        len(state["scale"].main)
    with pytest.raises(LayoutError, match="which has"):
        array.flat(0, array.size + 1)
    with pytest.raises(ValueError, match="without a copy"):
        np.asarray(array, copy=False)


@pytest.mark.parametrize("remote", [False, True])
def test_ten_elements_read_one_tile(
    tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch, remote: bool
) -> None:
    root = write_job(tmp_path, one_rank(60_000, tile_numel=4096, chunk_numel=40_960))
    moment = inspection.open(upload(memory, root) if remote else root)["p"].exp_avg_sq
    read = ReadBytes(monkeypatch)
    assert moment[9000:9010].tolist() == list(range(2_009_001, 2_009_011))
    assert (len(read.calls), read.nbytes) == (1, 4 * 4096 + 4)


def test_who_holds_what_and_steps(tmp_path: Path) -> None:
    state = inspection.open(write_job(tmp_path, halves(), counters=counted))
    parameter = state["p"]
    assert [(held.rank, held.offset, held.shape) for held in parameter.holders] == [
        (0, (0,), (3000,)),
        (1, (3000,), (2000,)),
    ]
    assert (state.step, parameter.step, parameter.numel) == (7, 7.0, 5000)
    assert parameter.main[2995:3005].tolist() == list(range(2996, 3006))
    assert set(parameter.arrays) == set(NAMES)


def test_steps_of_groups_and_steps_that_differ(tmp_path: Path) -> None:
    def of_group(source: SourceId) -> Any:
        return {"groups": [{"step": 5}, {}], "scalars": {}}

    def differing(source: SourceId) -> Any:
        return {"groups": [{}], "scalars": {"step": [[float(source.rank), 1]]}}

    assert inspection.open(write_job(tmp_path / "a", halves(), counters=of_group))["p"].step == 5
    state = inspection.open(write_job(tmp_path / "b", halves(), counters=differing))
    with pytest.raises(LayoutError, match="p has no one step: 0 on rank 0 opt-0, 1 on rank 1"):
        _ = state["p"].step


# ------------------------------------------------------------------------------ types, holes, names


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float16"])
def test_narrow_types_come_as_their_values(tmp_path: Path, dtype: str) -> None:
    job = one_rank(200, tile_numel=4096, chunk_numel=4096)
    state = inspection.open(write_job(tmp_path, job, arrays={"main": dtype}))
    wanted = np.arange(1, 201).astype(np.dtype(getattr(ml_dtypes, dtype, dtype)))
    found = state["p"].main[:]
    assert found.dtype == wanted.dtype
    assert found.tobytes() == wanted.tobytes()


def test_without_ml_dtypes_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = one_rank(200, tile_numel=4096, chunk_numel=4096)
    state = inspection.open(write_job(tmp_path, job, arrays={"main": "bfloat16"}))
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(BackendUnavailableError, match="pip install ml_dtypes"):
        state["p"].main[0]


def test_a_hole_is_an_error_and_the_rest_is_read(tmp_path: Path) -> None:
    job = halves()
    only = {SourceId(0, "opt-0"): job[SourceId(0, "opt-0")]}
    parameter = inspection.open(write_job(tmp_path, only))["p"]
    assert parameter.missing_numel == 2000
    assert parameter.main[2999] == 3000
    with pytest.raises(LayoutError, match="no rank holds 1 of the 2 elements of p at"):
        parameter.main[2999:3001]


def test_what_the_model_does_not_list_has_a_name_for_each_rank(tmp_path: Path) -> None:
    job = halves()
    for source, arrays in job.items():
        (shard,) = arrays.layout.shards
        job[source] = replace(
            arrays, layout=replace(arrays.layout, shards=(replace(shard, pieces=()),))
        )
    state = inspection.open(write_job(tmp_path, job))
    assert list(state) == ["rank-00000/opt-0/p", "rank-00001/opt-0/p"]
    assert state["rank-00001/opt-0/p"].main[:3].tolist() == [3001, 3002, 3003]


def test_ranks_that_differ_in_shape_are_refused(tmp_path: Path) -> None:
    job = halves()
    arrays = job[SourceId(1, "opt-0")]
    (shard,) = arrays.layout.shards
    other = replace(shard, pieces=flat("p", 6000).pieces, local_shape=(6000,))
    job[SourceId(1, "opt-0")] = replace(arrays, layout=replace(arrays.layout, shards=(other,)))
    with pytest.raises(LayoutError, match=r"p is \(6000,\) in rank 1 opt-0"):
        inspection.open(write_job(tmp_path, job))


def test_an_array_that_is_not_there_is_named(tmp_path: Path) -> None:
    state = inspection.open(write_job(tmp_path, one_rank(), arrays={"main": "float32"}))
    with pytest.raises(LayoutError, match="p has no exp_avg; it has main"):
        _ = state["p"].exp_avg
    with pytest.raises(LayoutError, match="no exp_avg_sq"):
        _ = state["p"].exp_avg_sq


def test_a_flipped_bit_is_an_error(tmp_path: Path) -> None:
    root = write_job(tmp_path, one_rank())
    with (root / "rank-00000/gen-a/opt-0/main/c/0").open("r+b") as file:
        file.seek(4096 + 5)
        file.write(b"\x7f")
    state = inspection.open(root)
    with pytest.raises(CorruptError, match="tile 0 of opt-0/main"):
        state["p"].main[0]


def test_a_frozen_step_is_opened_by_its_name(tmp_path: Path) -> None:
    root = write_job(tmp_path, one_rank())
    rank = root / "rank-00000"
    shutil.copytree(rank / "gen-a", rank / "frozen" / "kept")
    edit(rank / "gen-a" / "zarr.json", lambda about: {"state": "writing"})
    assert inspection.open(root, frozen="kept")["p"].main[41] == 42


# ------------------------------------------------------------------------------------ other readers


def test_zarr_opens_the_same_path(tmp_path: Path) -> None:
    root = write_job(tmp_path, one_rank())
    ours = inspection.open(root)["p"].exp_avg
    group = zarr.open_group(root, mode="r")
    theirs: Any = group["rank-00000/gen-a/opt-0/exp_avg"]
    assert (theirs[:] == ours[:]).all()


def test_xarray_opens_the_arrays_of_a_rank(tmp_path: Path) -> None:
    xarray: Any = pytest.importorskip("xarray")
    root = write_job(tmp_path, one_rank())
    data = xarray.open_zarr(root / "rank-00000/gen-a/opt-0", consolidated=False)
    assert (data["exp_avg"].values == inspection.open(root)["p"].exp_avg[:]).all()
    assert set(data.data_vars) == set(NAMES)


CODE = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "zarr"):
            raise ImportError(f"{name} is blocked", name=name)
sys.meta_path.insert(0, Blocked())
import json
from tierstore import inspection
state = inspection.open(sys.argv[1])
print(json.dumps([state.step, state["p"].exp_avg[1023:1025].tolist()]))
"""


def test_it_works_without_torch_and_zarr(tmp_path: Path) -> None:
    root = write_job(tmp_path, one_rank())
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(root)],
        cwd=ROOT,
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [7, [1_001_024, 1_001_025]]

"""The benchmarks on small sizes: numbers that agree with each other, and nothing left behind."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Self

import pytest
import torch

from benchmarks import file_limits, limits, sweep
from benchmarks.file_limits import DirectFiles, FileLimit, KvikioFiles, Mover
from benchmarks.limits import Rate
from benchmarks.measurement import Repeat, SizeResult, make_limit
from benchmarks.peers import __main__ as peers
from benchmarks.peers import child, serial_files
from benchmarks.peers.device_slot import ARRAYS
from benchmarks.peers.peer import PEERS, Outcome, Task
from benchmarks.peers.serial_files import SerialFiles, cached_share
from benchmarks.peers.serial_memory import SerialMemory
from benchmarks.problem import PARAMETER_NUMEL, Problem, make_optimizer, make_problem
from benchmarks.report import size_tables, table
from benchmarks.streamed import streamed
from benchmarks.units import parse_numel, parse_numels, readable_numel, spread
from tests.optimizers import bits
from tierstore.config import TierConfig
from tierstore.metrics import SweepMetrics

CPU = torch.device("cpu")
TILE_NUMEL = 65536
NUMEL = 1_000_000
PADDED_NUMEL = -(-NUMEL // TILE_NUMEL) * TILE_NUMEL


def config(tmp_path: Path, **options: Any) -> TierConfig:
    return TierConfig(
        **{
            "tier": "nvme",
            "directories": (tmp_path / "store",),
            "tile_numel": 4096,
            "chunk_numel": 4 * 4096,
            "io_threads": 2,
            **options,
        }
    )


@pytest.fixture
def problem(monkeypatch: pytest.MonkeyPatch) -> Problem:
    """A problem of several parameters, the last of them short."""
    monkeypatch.setattr("benchmarks.problem.PARAMETER_NUMEL", 12_800)
    return make_problem(26_048, CPU, seed=3)


def resident(problem: Problem, steps: int) -> dict[str, torch.Tensor]:
    """Weights and state of a copy of the problem whose state never leaves memory."""
    weight = problem.weight.clone()
    mains = [weight[place].float() for place in problem.parameters()]
    for main, place in zip(mains, problem.parameters(), strict=True):
        main.grad = problem.grad[place].clone()
    optimizer = make_optimizer("adamw-foreach", mains)
    for _ in range(steps):
        optimizer.step()
    weight.copy_(torch.cat(mains))
    states = [optimizer.state[main] for main in mains]
    return {
        "weight": weight,
        "main": torch.cat(mains),
        **{name: torch.cat([state[name] for state in states]) for name in ARRAYS[1:]},
    }


def expect_same_bits(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert bits(found[name]) == bits(value), name


# Units and tables.


@pytest.mark.parametrize(
    ("text", "numel"),
    [
        ("1G", 10**9),
        ("0.25G", 250_000_000),
        ("64m", 64_000_000),
        ("1K", 1024),
        ("128", 128),
        ("1.5K", 1536),
    ],
)
def test_sizes_are_decimal_and_whole_vectors(text: str, numel: int) -> None:
    assert parse_numel(text) == numel


@pytest.mark.parametrize("text", ["", "G", "1T", "0", "-1G", "1/0", "one"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="number of elements"):
        parse_numel(text)


def test_sizes_for_people() -> None:
    assert [readable_numel(numel) for numel in parse_numels("0.25G, 1M,2048")] == [
        "0.25G",
        "1M",
        "2.048K",
    ]
    assert spread([0.25, 0.5, 0.3]) == "0.300 [0.250..0.500]"


def test_tables_of_large_numbers_fit_a_terminal() -> None:
    metrics = SweepMetrics(read_nbytes=48 * 10**9, written_nbytes=48 * 10**9, wall_s=12.0)
    repeat = Repeat(
        step_s=0.9, cpu_s=123.45, page_cache_nbytes=-(2**40), device_peak_nbytes=0, metrics=metrics
    )
    rate = Rate(how="all", seconds=1.0, read_nbytes=10**11, written_nbytes=10**9)
    result = SizeResult(
        numel=1_234_000_000,
        state_nbytes=100 * 2**30,
        mode="direct",
        allocate_s=123.4,
        fill_s=123.4,
        window_nbytes=1023 * 2**20,
        device_held_nbytes=1023 * 2**20,
        store_host_nbytes=1023 * 2**30,
        host_growth_nbytes=1023 * 2**30,
        limits=[[rate], [rate]],
        repeats=[repeat],
    )
    text = size_tables([result])
    assert max(map(len, text.splitlines())) <= 100
    assert result.ratios == [pytest.approx(96 / 0.9 / 101)]


def test_tables_align() -> None:
    assert table(["a", "bb"], [["ccc", "d"]]) == "a    bb\n-------\nccc   d"


# The sweep.


@pytest.mark.parametrize(
    ("options", "how"),
    [
        (["--tier", "cpu"], "memcpy by two threads (no GPU)"),
        (["--tier", "nvme"], "direct I/O by 2 + 2 threads, each thread"),
        (["--tier", "nvme", "--recovery", "none"], "direct I/O by 2 + 2 threads, each thread"),
    ],
)
def test_sweep(
    options: list[str], how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stores, report = tmp_path / "stores", tmp_path / "report.json"
    arguments = [*options, "--numel", "64K,1M", "--device", "cpu", "--repeats", "2"]
    arguments += ["--tile-numel", str(TILE_NUMEL), "--chunk-numel", str(8 * TILE_NUMEL)]
    arguments += ["--io-threads", "2", "--json", str(report), "--dir", str(stores), "--one-way"]
    with no_fio():
        assert sweep.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "of the limit" in printed
    assert "1M without overlap" in printed
    assert how in printed
    assert not stores.exists() or not list(stores.iterdir())

    found = json.loads(report.read_text())
    assert found["command"].startswith("python -m benchmarks.sweep --tier")
    assert str(Path.home()) not in json.dumps(found["machine"])
    small, large = found["sizes"]
    assert (small["numel"], large["numel"]) == (64_000, NUMEL)
    assert large["state_nbytes"] == 12 * NUMEL
    assert large["window_nbytes"] == 4 * TILE_NUMEL * 12
    assert len(large["repeats"]) == 2
    assert len(large["limits"]) == 3
    for repeat in large["repeats"]:
        metrics = repeat["metrics"]
        assert metrics["read_nbytes"] == metrics["written_nbytes"] == 12 * PADDED_NUMEL
        moved = metrics["read_nbytes"] + metrics["written_nbytes"]
        assert repeat["gb_per_s"] == pytest.approx(moved / repeat["step_s"] / 1e9)
        assert 0 < metrics["wall_s"] <= repeat["step_s"]
        assert 0 <= repeat["host_share"] <= 1
    means = [
        (before[0]["gb_per_s"] + after[0]["gb_per_s"]) / 2
        for before, after in zip(large["limits"], large["limits"][1:], strict=False)
    ]
    assert [repeat["ratio"] for repeat in large["repeats"]] == [
        pytest.approx(repeat["gb_per_s"] / mean)
        for repeat, mean in zip(large["repeats"], means, strict=True)
    ]
    for (rate,) in large["limits"]:
        assert how in rate["how"]
        # The same bytes as the sweep, and the checksums' blocks where there are files.
        assert rate["read_nbytes"] == rate["written_nbytes"]
        assert 0 <= rate["read_nbytes"] - 12 * PADDED_NUMEL <= 3 * 4096 * 16
    both_ways = large["limits"][0][0]
    for (read, written), gain, after in zip(
        large["one_way"], large["overlap_gains"], large["limits"][1:], strict=True
    ):
        assert (read["read_nbytes"], read["written_nbytes"]) == (both_ways["read_nbytes"], 0)
        assert (written["read_nbytes"], written["written_nbytes"]) == (0, both_ways["read_nbytes"])
        in_turn_s = read["seconds"] + written["seconds"]
        assert gain == pytest.approx(in_turn_s / after[0]["seconds"])


@contextlib.contextmanager
def no_fio() -> Iterator[None]:
    """A machine without fio: what it takes is not ours to bound in a test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("benchmarks.file_limits.shutil.which", lambda name: None)
        yield


def test_sweep_says_what_it_can_not_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        sweep.main(["--tier", "nvme", "--numel", "1K"])
    assert "needs --dir" in capsys.readouterr().err
    arguments = ["--tier", "nvme", "--numel", "1000G", "--device", "cpu", "--dir", str(tmp_path)]
    with pytest.MonkeyPatch.context() as patch:
        # The state of a size that no drive here has, of a problem that memory has.
        small = make_problem(1024, CPU, 0)
        patch.setattr("benchmarks.measurement.make_problem", lambda *_: small)
        patch.setattr("benchmarks.sweep.TierConfig", lambda **options: config(tmp_path / "file"))
        (tmp_path / "file").write_text("")
        assert sweep.main(arguments) == 1
    assert "not measured" in capsys.readouterr().err


def test_interrupted_sweep_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(self: FileLimit) -> list[Rate]:
        raise KeyboardInterrupt

    monkeypatch.setattr(FileLimit, "measure", interrupt)
    arguments = ["--tier", "nvme", "--numel", "64K", "--device", "cpu", "--dir", str(tmp_path)]
    assert sweep.main([*arguments, "--recovery", "none"]) == 130
    assert not list(tmp_path.iterdir())
    assert "interrupted" in capsys.readouterr().err


# Limits of files.


@pytest.fixture
def fake_kvikio(monkeypatch: pytest.MonkeyPatch) -> None:
    """The part of kvikio that is used, for tensors in host memory."""

    class CuFile:
        def __init__(self, path: Path, flags: str) -> None:
            self.file = os.open(path, {"r": os.O_RDONLY, "r+": os.O_RDWR}[flags])

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *error: object) -> None:
            os.close(self.file)

        def pread(self, buffer: torch.Tensor, *, size: int, file_offset: int) -> Any:
            data: Any = buffer.numpy()[:size]
            return SimpleNamespace(get=lambda: os.preadv(self.file, [data], file_offset))

        def pwrite(self, buffer: torch.Tensor, *, size: int, file_offset: int) -> Any:
            data: Any = buffer.numpy()[:size]
            return SimpleNamespace(get=lambda: os.pwritev(self.file, [data], file_offset))

    module: Any = ModuleType("kvikio")
    module.CuFile = CuFile
    module.defaults = SimpleNamespace(get={"num_threads": 4, "task_size": 2**24}.__getitem__)
    monkeypatch.setitem(sys.modules, "kvikio", module)


MOVERS: dict[str, Callable[[], Mover]] = {
    "direct": lambda: DirectFiles(3, direct=True),
    "kvikio": lambda: KvikioFiles(CPU, depth=2),
}


@pytest.mark.usefixtures("fake_kvikio")
@pytest.mark.parametrize("mover", MOVERS)
@pytest.mark.parametrize("recovery", ["step", "none"])
@pytest.mark.parametrize("drives", [1, 2])
def test_measuring_files_changes_no_bit(
    mover: str, recovery: str, drives: int, problem: Problem, tmp_path: Path
) -> None:
    wanted = resident(problem, steps=3)
    directories = tuple(tmp_path / f"drive-{number}" for number in range(drives))
    chosen = config(tmp_path, recovery=recovery, directories=directories)
    with streamed(problem, chosen, "adamw-foreach") as subject:
        limit = FileLimit(subject.state.store, MOVERS[mover]())
        for _ in range(3):
            subject.step()
            subject.come_to_rest()
            before = subject.arrays()
            rates = limit.measure()
            read, written = limit.one_way()
            # A tile with its checksum by one call; kvikio moves the tile alone.
            call_nbytes = 4 * 4096 + (4096 if mover == "direct" else 0)
            nbytes = 3 * subject.layout.layout.n_tiles * call_nbytes
            assert {(rate.read_nbytes, rate.written_nbytes) for rate in rates} == {(nbytes, nbytes)}
            assert (read.read_nbytes, read.written_nbytes) == (nbytes, 0)
            assert (written.read_nbytes, written.written_nbytes) == (0, nbytes)
            expect_same_bits(subject.arrays(), before)
        limit.close()
        expect_same_bits({"weight": problem.weight, **subject.arrays()}, wanted)
    assert [path for directory in directories for path in directory.iterdir()] == []


def test_measuring_overwrites_only_tiles_of_the_other_generation(
    problem: Problem, tmp_path: Path
) -> None:
    with streamed(problem, config(tmp_path), "adamw") as subject:
        subject.step()
        subject.come_to_rest()
        limit = make_limit(subject)
        assert isinstance(limit, FileLimit)
        files = sorted((tmp_path / "store").glob("*/rank-*/gen-*/**/c/*"))
        before = {path: path.read_bytes() for path in files}
        limit.measure()
        changed = [path for path in files if path.read_bytes() != before[path]]
        (current,) = (path.resolve().name for path in (tmp_path / "store").glob("*/*/current"))
        assert changed == [path for path in files if current not in path.parts]
        assert all(path.read_bytes()[:4096] == before[path][:4096] for path in files)
        limit.close()


def test_files_that_end_early_are_an_error(tmp_path: Path) -> None:
    short, target = tmp_path / "short", tmp_path / "target"
    short.write_bytes(b"x" * 4096)
    target.touch()
    read, written = file_limits.Piece(short, 0, 8192), file_limits.Piece(target, 0, 8192)
    with pytest.raises(EOFError, match="ends before"):
        DirectFiles(1, direct=False).move(DirectFiles.ways[0], [read], [written])


def test_host_copies_count_the_bytes_of_a_sweep() -> None:
    copies = limits.HostCopies(10 * 4096, 4096)
    (rate,) = copies.measure()
    copies.close()
    assert (rate.read_nbytes, rate.written_nbytes) == (40960, 40960)
    better = Rate(how="better", seconds=rate.seconds / 2, read_nbytes=40960, written_nbytes=40960)
    assert limits.fastest([rate, better]) is better


# Peers.


def task(directory: Path, **options: Any) -> Task:
    given = {"numel": 64_000, "seed": 1, "device": "cpu", "optimizer": "adamw", "repeats": 2}
    return Task(**{**given, "directory": str(directory), "warmup": 1, **options})


@pytest.mark.parametrize("buffer_nbytes", [4 * 1000, 2**20])
def test_serial_files_equal_the_resident_optimizer(
    buffer_nbytes: int, problem: Problem, tmp_path: Path
) -> None:
    wanted = resident(problem, steps=3)
    peer = SerialFiles(
        problem,
        "adamw-foreach",
        tmp_path,
        cold=False,
        slot_numel=19_200,
        buffer_nbytes=buffer_nbytes,
    )
    with contextlib.closing(peer):
        for _ in range(3):
            peer.prepare()
            peer.step()
    found = {
        name: torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.float32)
        for name, path in peer.paths.items()
    }
    expect_same_bits({"weight": problem.weight, **found}, wanted)


def test_serial_memory_equals_the_resident_optimizer(problem: Problem) -> None:
    wanted = resident(problem, steps=3)
    with contextlib.closing(SerialMemory(problem, "adamw-foreach", slot_numel=19_200)) as peer:
        for _ in range(3):
            peer.prepare()
            peer.step()
        found = {name: array.clone() for name, array in peer.arrays.items()}
    expect_same_bits({"weight": problem.weight, **found}, wanted)


def test_cold_files_are_dropped_and_looked_for(
    problem: Problem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Not of the whole machine, in a test.
    monkeypatch.setattr(serial_files, "_DROP_CACHES", tmp_path / "drop_caches")
    peer = SerialFiles(problem, "adamw", tmp_path, cold=True)
    with contextlib.closing(peer):
        peer.prepare()
        peer.step()
    assert (tmp_path / "drop_caches").read_text() == "3"
    (share,) = peer.findings()["cached_share"]
    assert 0 <= share <= 1


def test_cached_share_of_a_file_just_written(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(10_000))
    with path.open("rb") as file:
        assert cached_share(file.fileno()) == 1.0


@pytest.mark.parametrize("name", ["tierstore-nvme", "tierstore-cpu", "serial-memory"])
def test_peers_are_measured(name: str, tmp_path: Path) -> None:
    outcome = child.measure(name, task(tmp_path))
    assert outcome.not_run == ""
    assert len(outcome.step_s) == 2
    assert outcome.moved_nbytes >= 24 * 64_000
    assert outcome.note


def test_a_missing_peer_is_not_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    outcome = child.measure("torchao", task(tmp_path))
    assert outcome.not_run.startswith("ModuleNotFoundError: ")
    assert "Traceback" in capsys.readouterr().err


def test_peers_run_in_processes_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.json"
    arguments = ["--numel", "64K", "--dir", str(tmp_path / "files"), "--device", "cpu"]
    arguments += ["--only", "serial-files-warm", "--repeats", "1", "--json", str(report)]
    assert peers.main(arguments) == 0
    assert "fdatasync" in capsys.readouterr().out
    (found,) = json.loads(report.read_text())["peers"]
    assert Outcome(**found).not_run == ""
    assert not list((tmp_path / "files").iterdir())


def test_a_process_that_dies_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert "status 1" in peers.run_peer("torchao", task(tmp_path), 60.0).not_run


def test_outcomes_stand_beside_ours() -> None:
    outcomes = [
        Outcome("tierstore-nvme", step_s=(1.0, 3.0, 2.0), note="ours"),
        Outcome("serial-files-cold", step_s=(5.0,), note="theirs"),
        Outcome("torchao", step_s=(5.0,), note="alone"),
        Outcome("deepspeed-nvme", not_run="ImportError: no"),
    ]
    lines = peers.outcomes_table(outcomes).splitlines()
    assert "2.50" in next(line for line in lines if line.startswith("serial-files-cold"))
    assert " - " in next(line for line in lines if line.startswith("torchao"))
    assert "deepspeed-nvme: not run: ImportError: no" in lines
    assert asdict(outcomes[0])["step_s"] == (1.0, 3.0, 2.0)


def test_every_peer_stands_beside_one_of_ours() -> None:
    assert {entry.beside for entry in PEERS.values()} <= PEERS.keys()
    assert PARAMETER_NUMEL % 64 == 0

"""What a user can choose: good values pass, every wrong one is named, all at once."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import example, given

from tierstore.config import GDS_MODES, RECOVERY_MODES, TierConfig
from tierstore.errors import ConfigError
from tierstore.layout import DEFAULT_TILE_NUMEL, MAX_CHUNK_NUMEL, StateLayout

ALL_WRONG: dict[str, Any] = {
    "chunk_numel": MAX_CHUNK_NUMEL + 1,
    "tile_numel": 1000,
    "slots": 0,
    "host_memory_nbytes": 0,
    "role": "../actor",
    "recovery": "always",
    "resume": "yes",
    "io_threads": 0,
    "gds": "always",
    "timeout_s": 0.0,
}


def make_config(**changed: Any) -> TierConfig:
    return TierConfig(**{"tier": "nvme"} | changed)


def test_defaults() -> None:
    config = TierConfig(tier="cpu")
    assert dataclasses.asdict(config) == {
        "tier": "cpu",
        "directories": (),
        "chunk_numel": 200_000_000,
        "tile_numel": 4 * 2**20,
        "slots": 4,
        "host_memory_nbytes": None,
        "role": "train",
        "recovery": "step",
        "resume": "never",
        "io_threads": 4,
        "gds": "auto",
        "timeout_s": 600.0,
    }
    assert (config.chunk_numel, config.tile_numel) == (MAX_CHUNK_NUMEL, DEFAULT_TILE_NUMEL)


def test_is_a_value() -> None:
    config = make_config(directories=(Path("stores"),))
    assert config == make_config(directories=(Path("stores"),))
    assert hash(config) == hash(make_config(directories=(Path("stores"),)))
    assert dataclasses.replace(config, slots=2).slots == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.slots = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    "good",
    [
        {"chunk_numel": 1024},
        {"chunk_numel": 1025},
        {"chunk_numel": MAX_CHUNK_NUMEL},
        {"chunk_numel": 1024, "tile_numel": 4096},
        {"tile_numel": 1024},
        {"tile_numel": 2**40},
        {"slots": 1},
        {"host_memory_nbytes": 1},
        {"io_threads": 1},
        {"timeout_s": 0.001},
        {"timeout_s": 10},
        *({"recovery": mode} for mode in RECOVERY_MODES),
        *({"gds": mode} for mode in GDS_MODES),
    ],
    ids=repr,
)
def test_values_in_range_pass(good: dict[str, Any]) -> None:
    config = make_config(**good)
    assert {name: getattr(config, name) for name in good} == good


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("chunk_numel", 0),
        ("chunk_numel", -1024),
        ("chunk_numel", 1023),
        ("chunk_numel", MAX_CHUNK_NUMEL + 1),
        ("tile_numel", 0),
        ("tile_numel", -1024),
        ("tile_numel", 1023),
        ("tile_numel", 1025),
        ("slots", 0),
        ("slots", -1),
        ("host_memory_nbytes", 0),
        ("host_memory_nbytes", -1),
        ("recovery", ""),
        ("recovery", "Step"),
        ("gds", ""),
        ("gds", "Auto"),
        ("io_threads", 0),
        ("io_threads", -4),
        ("timeout_s", 0),
        ("timeout_s", -1.0),
        ("timeout_s", math.nan),
        ("timeout_s", -math.inf),
    ],
)
def test_values_out_of_range_are_named(name: str, wrong: Any) -> None:
    with pytest.raises(ConfigError) as raised:
        make_config(**{name: wrong})
    message = str(raised.value)
    assert message.startswith(f"{name} is ")
    assert [other for other in ALL_WRONG if f"{other} is " in message] == [name]


@pytest.mark.parametrize("given", ["a/b", Path("a/b"), ["a/b"], (Path("a/b"),)], ids=repr)
def test_one_directory_is_taken_in_any_form(given: Any) -> None:
    assert make_config(directories=given).directories == (Path("a/b"),)


def test_a_directory_named_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "a")
    for twin in ("a", "b/../a", "link", "./a/"):
        with pytest.raises(ConfigError, match="the same one") as raised:
            make_config(directories=(f"{tmp_path}/a", f"{tmp_path}/b", f"{tmp_path}/{twin}"))
        assert f"{tmp_path}/a and {Path(f'{tmp_path}/{twin}')}," in str(raised.value)
    assert len(make_config(directories=(tmp_path / "a", tmp_path / "a/b")).directories) == 2


@pytest.mark.parametrize("timeout_s", [math.inf, 1e300, 1e12])
def test_a_deadline_that_no_clock_can_wait_for_is_refused(timeout_s: float) -> None:
    """Waiting that long is an `OverflowError` in queues and futures."""
    with pytest.raises(ConfigError, match="timeout_s"):
        make_config(timeout_s=timeout_s)


@pytest.mark.parametrize(
    "role", ["train", "actor", "critic-2", "A", "7", "a.b_c-d", "x" * 64, "0."]
)
def test_role_is_part_of_a_directory_name(role: str) -> None:
    assert make_config(role=role).role == role


@pytest.mark.parametrize(
    "role",
    ["", ".", "..", ".hidden", "-dash", "_x", "a/b", "a b", "a\n", "\n", "a\0", "rôle", "x" * 65],
)
def test_role_that_would_leave_its_directory_is_refused(role: str) -> None:
    with pytest.raises(ConfigError, match="role is "):
        make_config(role=role)


@given(st.text(max_size=70))
@example("a" * 64 + "\n")
def test_no_role_leads_out_of_the_directory(role: str) -> None:
    try:
        make_config(role=role)
    except ConfigError:
        return
    assert (Path("root") / role).parent == Path("root")
    assert (Path("root") / role).name == role
    assert role.isascii()
    assert role.isprintable()


def test_all_wrong_values_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as raised:
        make_config(**ALL_WRONG)
    assert [name for name in ALL_WRONG if f"{name} is " in str(raised.value)] == list(ALL_WRONG)


@given(st.sets(st.sampled_from(sorted(ALL_WRONG))))
def test_the_wrong_values_are_named_and_no_others(names: set[str]) -> None:
    wrong = {name: ALL_WRONG[name] for name in names}
    if not names:
        make_config()
        return
    with pytest.raises(ConfigError) as raised:
        make_config(**wrong)
    assert {name for name in ALL_WRONG if f"{name} is " in str(raised.value)} == names


@given(
    chunk_numel=st.integers(1024, MAX_CHUNK_NUMEL),
    tile_numel=st.integers(1, 2**30).map(lambda blocks: 1024 * blocks),
    numel=st.integers(0, 10**12),
    least_chunks=st.integers(1, 100),
)
def test_whatever_passes_can_be_planned(
    chunk_numel: int, tile_numel: int, numel: int, least_chunks: int
) -> None:
    config = make_config(chunk_numel=chunk_numel, tile_numel=tile_numel)
    layout = StateLayout.plan(
        [],
        numel=numel,
        chunk_numel=config.chunk_numel,
        tile_numel=config.tile_numel,
        least_chunks=least_chunks,
    )
    assert layout.chunk_numel <= chunk_numel
    assert layout.n_chunks >= min(least_chunks, layout.n_tiles)
    assert layout.tile_numel <= tile_numel

"""Flags, and options that do not go with tiered state. No Megatron is needed for these."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tierstore.adapters.megatron import arguments
from tierstore.adapters.megatron.arguments import add_arguments, config_from_args, parse_nbytes
from tierstore.adapters.megatron.guards import refuse_arguments
from tierstore.config import TierConfig
from tierstore.errors import ConfigError

DIRECTORY = ["--optimizer-state-dir", "somewhere"]


def parse(*words: str, **others: Any) -> argparse.Namespace:
    parser = add_arguments(argparse.ArgumentParser())
    return parser.parse_args(list(words), argparse.Namespace(**others))


def test_without_flags_megatron_stays_untouched() -> None:
    assert config_from_args(parse(optimizer="sgd", async_save=True)) is None


def test_defaults_are_those_of_the_configuration() -> None:
    assert config_from_args(parse("--optimizer-state-tier=cpu")) == TierConfig(tier="cpu")


def test_every_flag_arrives() -> None:
    config = config_from_args(
        parse(
            "--optimizer-state-tier=nvme",
            "--optimizer-state-dir=a/b, c",
            "--optimizer-state-chunk-numel=5000",
            "--optimizer-state-tile-numel=2048",
            "--optimizer-state-slots=3",
            "--optimizer-state-host-memory=1.5MiB",
            "--optimizer-state-recovery=none",
            "--optimizer-state-io-threads=7",
            "--optimizer-state-gds=require",
            "--optimizer-state-role=critic",
        )
    )
    assert config == TierConfig(
        tier="nvme",
        directories=(Path("a/b"), Path("c")),
        chunk_numel=5000,
        tile_numel=2048,
        slots=3,
        host_memory_nbytes=3 * 2**19,
        recovery="none",
        io_threads=7,
        gds="require",
        role="critic",
    )


@pytest.mark.parametrize("tier", ["nvme", "gds"])
def test_file_tiers_need_a_directory(tier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "available_tiers", lambda: dict.fromkeys(["nvme", "gds"]))
    with pytest.raises(ConfigError, match="needs --optimizer-state-dir"):
        config_from_args(parse(f"--optimizer-state-tier={tier}"))


@pytest.mark.parametrize("text", ["", ",", "a,", ",a", "a,,b", "a, ,b"])
def test_a_directory_without_a_name_is_refused(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse("--optimizer-state-tier=nvme", f"--optimizer-state-dir={text}")
    assert f"{text!r} has an empty part" in capsys.readouterr().err


def test_a_directory_named_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"a and b/\.\./a, which are the same one"):
        config_from_args(parse("--optimizer-state-tier=nvme", "--optimizer-state-dir=a,b/../a"))


def test_a_tier_that_is_not_there_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "available_tiers", lambda: dict.fromkeys(["nvme", "cpu"]))
    with pytest.raises(ConfigError, match=r"gds tier is not in this installation.*cpu, nvme"):
        config_from_args(parse("--optimizer-state-tier=gds"))


def test_tiers_of_others_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "available_tiers", lambda: dict.fromkeys(["cpu", "mine"]))
    config = config_from_args(parse("--optimizer-state-tier=mine"))
    assert config == TierConfig(tier="mine")


def test_a_directory_without_a_tier_is_remarked_on(caplog: pytest.LogCaptureFixture) -> None:
    assert config_from_args(parse(*DIRECTORY)) is None
    assert "stays where it is" in caplog.text


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("17", 17), ("4K", 4096), ("512MiB", 2**29), ("2 gib", 2**31), ("1.5GB", 3 * 2**29)],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert parse_nbytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "much", "-1", "1PiB", "0x10", "1.2.3G", "nan"])
def test_what_is_not_a_size(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a size"):
        parse_nbytes(text)


def test_unknown_tiers_are_refused_by_the_parser(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--optimizer-state-tier=floppy")
    assert "invalid choice: 'floppy'" in capsys.readouterr().err


def test_what_is_refused_is_refused_with_the_flags() -> None:
    with pytest.raises(ConfigError, match="--qk-clip"):
        config_from_args(parse("--optimizer-state-tier=cpu", qk_clip=True))


def test_safe_options_are_not_refused() -> None:
    refuse_arguments(
        SimpleNamespace(
            optimizer="adam",
            use_distributed_optimizer=True,
            overlap_grad_reduce=True,
            overlap_param_gather=True,
            ckpt_format="torch_dist",
            fp16=True,
            async_save=False,
            lora_rank=0,
            non_persistent_ckpt_type=None,
        )
    )

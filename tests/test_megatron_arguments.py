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


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"optimizer": "sgd"}, "other than adam"),
    ({"optimizer": "muon"}, "other than adam"),
    ({"use_distributed_optimizer": False}, "--use-distributed-optimizer (off)"),
    ({"use_precision_aware_optimizer": True}, "use_precision_aware_optimizer"),
    ({"optimizer_cpu_offload": True}, "optimizer_cpu_offload"),
    ({"offload_optimizer_states": True}, "offload_optimizer_states"),
    ({"chunked_optimizer_state_offload": True}, "chunked_optimizer_state_offload"),
    ({"use_megatron_fsdp": True}, "use_megatron_fsdp"),
    ({"use_custom_fsdp": True}, "use_custom_fsdp"),
    ({"use_torch_fsdp2": True}, "--use-torch-fsdp2"),
    ({"fp8_param_gather": True}, "fp8_param_gather"),
    ({"fp4_param_gather": True}, "fp4_param_gather"),
    ({"fp8_param": True}, "fp8_param"),
    ({"reuse_grad_buf_for_mxfp8_param_ag": True}, "reuse_grad_buf_for_mxfp8_param_ag"),
    ({"optimizer_cuda_graph": True}, "optimizer_cuda_graph"),
    ({"use_layer_wise_distributed_optimizer": True}, "use_layer_wise_distributed_optimizer"),
    ({"qk_clip": True}, "qk_clip"),
    ({"log_params_norm": True}, "--log-params-norm"),
    ({"async_save": True}, "--async-save"),
    ({"ckpt_format": "fsdp_dtensor"}, "--ckpt-format"),
    ({"ckpt_format": "torch_dcp"}, "--ckpt-format"),
    ({"non_persistent_ckpt_type": "local"}, "--non-persistent-ckpt-type"),
]


@pytest.mark.parametrize(("options", "named"), REFUSED, ids=str)
def test_each_unsafe_option_is_refused_with_a_reason(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_from_args(parse("--optimizer-state-tier=cpu", **options))
    lines = [line for line in str(caught.value).splitlines() if line.startswith("  - ")]
    assert len(lines) == 1
    name, reason = lines[0].removeprefix("  - ").split(": ", 1)
    assert named in name
    assert len(reason) > 20


def test_all_unsafe_options_are_named_at_once() -> None:
    together: dict[str, Any] = {}
    for options, _ in REFUSED:
        together |= options
    with pytest.raises(ConfigError) as caught:
        refuse_arguments(SimpleNamespace(**together))
    for options, named in REFUSED:
        if options.items() <= together.items():
            assert named in str(caught.value)


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
            non_persistent_ckpt_type=None,
        )
    )

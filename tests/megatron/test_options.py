"""Every row of the table of options has a test, and says what the code does."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from megatron_cases import STEPS, Build, Case, megatron_builds
from test_bit_equal import CASES

from tierstore.adapters.megatron.guards import refuse_arguments
from tierstore.adapters.megatron.options import OPTIONS, Option, page
from tierstore.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
BUILDS = [build for build in megatron_builds() if build.flavour == "torch"]
REFUSED = [option for option in OPTIONS if not option.works]
WORKING = [option for option in OPTIONS if option.works]
IN_ARGUMENTS = [option for option in REFUSED if option.on != "parameter"]


def name_of(value: Any) -> str:
    if isinstance(value, Build):
        return value.version
    return f"{value.name} {value.condition}"


def lines_of(error: ConfigError) -> list[str]:
    return [line for line in str(error).splitlines() if line.startswith("  - ")]


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, list[str]]]:
    """By version of Megatron and option: what `attach` says with the option on real objects."""
    found = {}
    for build in BUILDS:
        script = Path(__file__).with_name("megatron_option_checks.py")
        places = [build.path, str(ROOT), str(script.parent), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places))}
        environment["OMP_NUM_THREADS"] = "1"
        done = subprocess.run(
            [sys.executable, "-W", "ignore", str(script), str(tmp_path_factory.mktemp("options"))],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        found[build.version] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.megatron
@pytest.mark.parametrize("option", REFUSED, ids=name_of)
@pytest.mark.parametrize("build", BUILDS, ids=name_of)
def test_a_refused_option_is_refused(
    option: Option, build: Build, refusals: dict[str, dict[str, list[str]]]
) -> None:
    """On Megatron's own config objects, or, for what only they say, on training arguments."""
    assert refusals[build.version][option.line] == [f"  - {option.line}"]


@pytest.mark.parametrize("option", IN_ARGUMENTS, ids=name_of)
def test_a_refused_argument_is_named_alone(option: Option) -> None:
    with pytest.raises(ConfigError) as caught:
        refuse_arguments(SimpleNamespace(**option.example))
    assert lines_of(caught.value) == [f"  - {option.line}"]
    assert len(option.reason) > 20


def test_all_refused_arguments_are_named_at_once() -> None:
    together: dict[str, Any] = {}
    for option in IN_ARGUMENTS:
        together |= option.example
    with pytest.raises(ConfigError) as caught:
        refuse_arguments(SimpleNamespace(**together))
    assert lines_of(caught.value) == [f"  - {option.line}" for option in IN_ARGUMENTS]


def test_without_any_option_nothing_is_refused() -> None:
    refuse_arguments(SimpleNamespace())


def _cases_of(which: str) -> list[Case]:
    """Cases of the comparison that have a field at a value."""
    name, value = which.split("=")
    if name == "steps":
        return CASES if int(value) == STEPS else []
    return [
        case
        for case in CASES
        for holder in (case, case.recipe, case.tier)
        if str(getattr(holder, name, None)) == value
    ]


@pytest.mark.parametrize("option", WORKING, ids=name_of)
def test_a_working_option_has_a_test(option: Option) -> None:
    path, _, name = option.test.partition("::")
    if name:
        tree = ast.parse((ROOT / path).read_text())
        assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        return
    path, _, which = option.test.partition(": ")
    assert path == "tests/megatron/test_bit_equal.py"
    if not BUILDS:
        pytest.skip("no megatron-core is installed, so there are no cases")
    assert _cases_of(which), f"no case has {which}"


def test_no_row_is_there_twice() -> None:
    lines = [(option.name, option.condition) for option in OPTIONS]
    assert len(set(lines)) == len(lines)


def test_the_page_is_up_to_date() -> None:
    assert (ROOT / "docs" / "OPTIONS.md").read_text() == page(), "run `make docs`"

"""What modules say they offer is there, complete and sorted, and costs no heavy import."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {
    "tierstore": ROOT / "tierstore",
    "tierstore.adapters": ROOT / "adapters",
    "tierstore.backends": ROOT / "backends",
}
# Stand-ins for CUDA and Apex, which are torch code through and through.
NEED_TORCH = {"tierstore.testing.fused_adam", "tierstore.testing.megatron_on_cpu"}
HEAVY = ("apex", "cupy", "kvikio", "megatron", "torch", "transformer_engine", "zarr")


def public_modules() -> Iterator[tuple[str, Path]]:
    """Yield every module that no underscore hides, with its file."""
    for package, folder in FOLDERS.items():
        for path in folder.rglob("*.py"):  # rglob does not follow the links
            parts = path.relative_to(folder).with_suffix("").parts
            names = [package, *(part for part in parts if part != "__init__")]
            if not any(name.startswith("_") for name in names):
                yield ".".join(names), path


MODULES = dict(sorted(public_modules()))


def is_package(module: str) -> bool:
    return MODULES[module].name == "__init__.py"


def _is_ours(node: ast.ImportFrom) -> bool:
    return (node.module or "").partition(".")[0] == "tierstore"


def declared(module: str) -> list[str] | None:
    """The value of ``__all__`` in the source, or None."""
    for node in ast.parse(MODULES[module].read_text()).body:
        if isinstance(node, ast.Assign) and [ast.unparse(t) for t in node.targets] == ["__all__"]:
            value: list[str] = ast.literal_eval(node.value)
            return value
    return None


def defined(module: str) -> set[str]:
    """Public classes and functions of the module; what a package takes from its modules, too."""
    found = set()
    for node in ast.parse(MODULES[module].read_text()).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            found.add(node.name)
        elif is_package(module) and isinstance(node, ast.ImportFrom) and _is_ours(node):
            found |= {alias.asname or alias.name for alias in node.names}
    return {name for name in found if not name.startswith("_")}


def imported(module: str) -> Any:
    if module in NEED_TORCH:
        pytest.importorskip("torch")
    return importlib.import_module(module)


def like_ruff(name: str) -> tuple[int, list[tuple[int, str]]]:
    """CONSTANTS, then Classes, then functions, numbers by their value, as ruff sorts them."""
    kind = 0 if name.isupper() else 1 if name[0].isupper() else 2
    return kind, [(int(part) if part.isdigit() else -1, part) for part in re.split(r"(\d+)", name)]


def test_the_modules_are_found() -> None:
    assert {"tierstore", "tierstore.layout", "tierstore.backends.posix"} < set(MODULES)
    assert {"tierstore.adapters.megatron", "tierstore.testing.conformance"} < set(MODULES)
    assert "tierstore.backends._tree" not in MODULES
    assert MODULES.keys() > NEED_TORCH


@pytest.mark.parametrize("module", MODULES)
def test_all_is_complete(module: str) -> None:
    names = declared(module)
    if names is None:
        assert defined(module) == set(), f"{module} has no __all__"
    else:
        assert defined(module) - set(names) == set()


@pytest.mark.parametrize("module", [name for name in MODULES if declared(name) is not None])
def test_all_is_sorted_and_names_what_is_there(module: str) -> None:
    names = declared(module)
    assert names is not None
    assert names == sorted(set(names), key=like_ruff)
    assert [name for name in names if name.startswith("_")] == []
    loaded = imported(module)
    assert loaded.__all__ == names
    assert [name for name in names if not hasattr(loaded, name)] == []


@pytest.mark.parametrize("module", [name for name in MODULES if not is_package(name)])
def test_only_packages_offer_what_other_modules_define(module: str) -> None:
    taken = {
        alias.asname or alias.name
        for node in ast.walk(ast.parse(MODULES[module].read_text()))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }
    assert taken & set(declared(module) or []) == set()


def test_the_package_offers_its_main_nouns() -> None:
    import tierstore
    from tierstore.config import TierConfig
    from tierstore.layout import Extent, Shard, StateLayout
    from tierstore.registry import available_tiers
    from tierstore.store import TierStore

    offered = {name: getattr(tierstore, name) for name in tierstore.__all__}
    assert offered == {
        "Extent": Extent,
        "Shard": Shard,
        "StateLayout": StateLayout,
        "TierConfig": TierConfig,
        "TierStore": TierStore,
        "available_tiers": available_tiers,
    }


# ------------------------------------------------------------------------------------ light imports

BLOCK = f"""
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {HEAVY}:
            raise ImportError(f"{{name}} is blocked", name=name)

sys.meta_path.insert(0, Blocked())
"""

TRY = """
import importlib, json
wrong = {}
for name in json.loads(sys.argv[1]):
    try:
        importlib.import_module(name)
    except ImportError as error:
        wrong[name] = str(error)
print(json.dumps(wrong))
"""

USE = """
import json
from tierstore import Shard, StateLayout, TierConfig, available_tiers
from tierstore.errors import LayoutError
from tierstore.zarr_format import ArrayFormat, checksum, group_metadata

config = TierConfig(tier="nvme", tile_numel=1024)
layout = StateLayout.plan(
    [Shard(name="p", numel=3000, array_start=0, local_shape=(3000,))],
    chunk_numel=config.chunk_numel, tile_numel=config.tile_numel,
)
form = ArrayFormat(
    dtype="float32", numel=layout.numel,
    chunk_numel=layout.chunk_numel, tile_numel=layout.tile_numel,
)
found = json.dumps([len(form.header(3)), form.file_nbytes(3), layout.n_tiles])
json.dumps([form.metadata(), group_metadata(layout.to_json())])
available_tiers(), checksum(b"")
print(found)
"""


def run_blocked(code: str, *args: str) -> Any:
    """Run code in a process that can't import anything heavy; what it prints, as JSON."""
    done = subprocess.run(
        [sys.executable, "-c", BLOCK + code, *args],
        cwd=ROOT,
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_block_works() -> None:
    wrong = run_blocked(TRY, json.dumps([*HEAVY, "numpy"]))
    assert wrong == {name: f"{name} is blocked" for name in HEAVY}


def test_modules_import_without_torch_zarr_or_frameworks() -> None:
    light = [module for module in MODULES if module not in NEED_TORCH]
    assert run_blocked(TRY, json.dumps(light)) == {}


def test_layout_format_and_configuration_work_without_torch() -> None:
    assert run_blocked(USE) == [4096, 4096 + 3 * 8192, 3]

"""The package is whole: folders, links, wheel, direction of imports, and what -O leaves."""

from __future__ import annotations

import ast
import importlib
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
LINKS = ("tierstore/adapters", "tierstore/backends")
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS: dict[str, Any] = PROJECT["tool"]["setuptools"]


def run_python(*args: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run this Python apart from the repository's root and from pytest; ask for its output."""
    inherited = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, *args],
        cwd=cwd,
        env=inherited | environment,
        check=False,
        capture_output=True,
        text=True,
    )


def folder_of(package: str) -> Path:
    """Return the real folder of a package, by the same map that the build uses."""
    package_dir: dict[str, str] = SETUPTOOLS["package-dir"]
    nearest = max((p for p in package_dir if f"{package}.".startswith(f"{p}.")), key=len)
    return ROOT / package_dir[nearest] / package.removeprefix(nearest).strip(".").replace(".", "/")


def packages_in_folders() -> Iterator[str]:
    """Yield every package that the mapped folders hold."""
    for package, folder in SETUPTOOLS["package-dir"].items():
        for init in (ROOT / folder).rglob("__init__.py"):  # rglob does not follow the links
            below = init.parent.relative_to(ROOT / folder).parts
            yield ".".join((package, *below))


def python_files() -> Iterator[Path]:
    """Yield every Python file that the wheel must hold."""
    for folder in SETUPTOOLS["package-dir"].values():
        yield from (ROOT / folder).rglob("*.py")


# -------------------------------------------------------------------------------- folders and links


def test_package_list_equals_folders() -> None:
    assert sorted(SETUPTOOLS["packages"]) == sorted(packages_in_folders())


def test_package_list_leaves_no_module_out() -> None:
    """A folder without ``__init__.py`` would work from the root and be missing from the wheel."""
    listed = {folder_of(package) for package in SETUPTOOLS["packages"]}
    assert {path for path in python_files() if path.parent not in listed} == set()


@pytest.mark.parametrize("link", LINKS)
def test_link_resolves(link: str) -> None:
    assert (ROOT / link).resolve() == ROOT / Path(link).name
    assert (ROOT / link / "__init__.py").is_file()


@pytest.mark.parametrize("link", LINKS)
def test_link_is_committed_as_a_link(link: str) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "--stage", "--", link],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
    )
    if listed.returncode != 0 or not listed.stdout:
        pytest.skip("not a checkout")
    assert listed.stdout.split()[0] == "120000"
    assert (ROOT / link).readlink() == Path("..") / Path(link).name


@pytest.mark.parametrize("name", ["adapters", "backends"])
def test_second_copy_is_refused(name: str) -> None:
    done = run_python("-c", f"import {name}", cwd=ROOT)
    assert done.returncode == 1
    assert f"ImportError: this package is tierstore.{name}, not {name}" in done.stderr

    done = run_python("-c", f"import tierstore.{name}", cwd=ROOT)
    assert done.returncode == 0, done.stderr


# ----------------------------------------------------------------------------------------- archives


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of what the build reads: building in the root would leave `build/` there."""
    copy = tmp_path_factory.mktemp("sources")
    not_sources = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist")
    for path in ROOT.iterdir():
        if path.is_dir() and not path.name.startswith(".") and path.suffix != ".egg-info":
            shutil.copytree(path, copy / path.name, symlinks=True, ignore=not_sources)
        elif path.is_file():
            shutil.copy2(path, copy)
    return copy


def build(kind: str, source: Path, into: Path) -> Path:
    """Build a wheel or an sdist with the installed setuptools, so without the network."""
    code = f"import setuptools.build_meta as b, sys; b.build_{kind}(sys.argv[1])"
    done = run_python("-c", code, str(into), cwd=source)
    assert done.returncode == 0, done.stdout + done.stderr
    [built] = into.iterdir()
    return built


def expected_in_wheel() -> set[str]:
    files = {
        f"{package.replace('.', '/')}/{path.name}"
        for package in SETUPTOOLS["packages"]
        for path in folder_of(package).glob("*.py")
    }
    return files | {"tierstore/py.typed"}


def modules_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def test_wheel_holds_every_module(sources: Path, tmp_path: Path) -> None:
    wheel = build("wheel", sources, tmp_path)
    assert modules_in(wheel) == expected_in_wheel()
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        [entry_points] = [n for n in names if n.endswith("/entry_points.txt")]
        registered = archive.read(entry_points).decode()
    assert "[tierstore.backends]" in registered
    for tier, target in PROJECT["project"]["entry-points"]["tierstore.backends"].items():
        assert f"{tier} = {target}" in registered
    assert any(name.endswith("/licenses/LICENSE") for name in names)


def test_wheel_needs_no_links(sources: Path, tmp_path: Path) -> None:
    """An archive or a checkout may have lost the links; only checkers and editors miss them."""
    copy = tmp_path / "copy"
    shutil.copytree(sources, copy, symlinks=True)
    for link in LINKS:
        (copy / link).unlink()
    into = tmp_path / "wheel"
    into.mkdir()
    assert modules_in(build("wheel", copy, into)) == expected_in_wheel()


def test_sdist_builds_the_same_wheel(sources: Path, tmp_path: Path) -> None:
    for folder in ("sdist", "unpacked", "wheel"):
        (tmp_path / folder).mkdir()
    sdist = build("sdist", sources, tmp_path / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    [unpacked] = (tmp_path / "unpacked").iterdir()
    for name in ("CHANGELOG.md", "LICENSE", "Makefile", "README.md", "tests/test_packaging.py"):
        assert (unpacked / name).is_file(), name
    assert modules_in(build("wheel", unpacked, tmp_path / "wheel")) == expected_in_wheel()


def test_wheel_imports_outside_the_repository(sources: Path, tmp_path: Path) -> None:
    wheel = build("wheel", sources, tmp_path)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]);"
        "import tierstore.adapters, tierstore.backends, tierstore.testing;"
        "print(tierstore.backends.__file__)"
    )
    done = run_python("-c", code, str(wheel), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"{wheel}/tierstore/backends/__init__.py"


@pytest.mark.parametrize("tier", PROJECT["project"]["entry-points"]["tierstore.backends"])
def test_entry_point_leads_somewhere(tier: str) -> None:
    """Compare source with source: the installed list may be that of an older set-up."""
    target: str = PROJECT["project"]["entry-points"]["tierstore.backends"][tier]
    module, _, name = target.partition(":")
    assert callable(getattr(importlib.import_module(module), name))


# ----------------------------------------------------------------------------- direction of imports


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]);"
        "from importlinter.cli import lint_imports;"
        "sys.exit(lint_imports(config_filename='pyproject.toml', no_cache=True))"
    )
    return run_python("-c", code, str(root), cwd=root)


def test_imports_point_one_way() -> None:
    done = lint_imports(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("module", "statement"),
    [
        ("tierstore/wrong.py", "import tierstore.backends.posix"),
        ("tierstore/wrong.py", "from tierstore import adapters"),
        ("tierstore/testing/wrong.py", "import tierstore.backends"),
        ("backends/wrong.py", "import tierstore.adapters"),
        ("tierstore/wrong.py", "def lazily() -> None:\n    import kvikio.zarr"),
        ("tierstore/wrong.py", "import cupy"),
        ("tierstore/wrong.py", "from megatron.core import parallel_state"),
        ("backends/wrong.py", "import megatron.core.optimizer"),
    ],
)
def test_imports_the_other_way_are_found(
    sources: Path, tmp_path: Path, module: str, statement: str
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(sources, copy, symlinks=True)
    (copy / module).write_text(statement + "\n")
    done = lint_imports(copy)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "wrong" in done.stdout, done.stdout


def test_import_is_light(tmp_path: Path) -> None:
    """Layout, format and inspection run without torch, and none of these is quick to import."""
    heavy = ("apex", "cupy", "kvikio", "megatron", "torch", "zarr")
    code = f"import sys, tierstore; print([m for m in {heavy} if m in sys.modules])"
    done = run_python("-c", code, cwd=ROOT)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


# ---------------------------------------------------------------------------------------- python -O


def test_asserts_of_tests_survive_optimization() -> None:
    """``python -O`` drops asserts, but pytest rewrites those of test modules before that."""
    with pytest.raises(AssertionError):
        assert not __name__  # a constant would be optimized away or warned about


def test_optimization_reaches_the_workers() -> None:
    """``python -O -m pytest -n 2`` would not: the variable does, so ``make`` uses that."""
    assert bool(sys.flags.optimize) == bool(os.environ.get("PYTHONOPTIMIZE"))


def has_assert(path: Path) -> bool:
    return any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(path.read_text())))


def test_helpers_of_tests_have_no_assert() -> None:
    """In a helper it would check nothing under ``-O``: raise AssertionError there."""
    helpers = {
        path
        for path in (ROOT / "tests").rglob("*.py")
        if not path.name.startswith("test_") and path.name != "conftest.py"
    }
    assert {path.name for path in helpers if has_assert(path)} == set()


def test_shipped_code_has_no_assert() -> None:
    """Under ``-O`` it would check nothing, and input and I/O need typed errors."""
    for package in SETUPTOOLS["packages"]:
        assert [path for path in folder_of(package).glob("*.py") if has_assert(path)] == []

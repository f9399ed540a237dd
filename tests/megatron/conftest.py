"""The processes that train, shared by all tests of the session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from megatron_cases import Case
from megatron_harness import GroupPool


@pytest.fixture(scope="session")
def megatron_groups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GroupPool]:
    """Groups of Megatron processes, started when a case needs them."""
    pool = GroupPool(tmp_path_factory.mktemp("megatron"))
    yield pool
    pool.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let cases of one group of processes follow one another, whatever test they belong to."""
    places = [place for place, item in enumerate(items) if _case_of(item) is not None]
    ordered = sorted((items[place] for place in places), key=_group_of)
    for place, item in zip(places, ordered, strict=True):
        items[place] = item


def _case_of(item: pytest.Item) -> Case | None:
    callspec = getattr(item, "callspec", None)
    case = None if callspec is None else callspec.params.get("case")
    return case if isinstance(case, Case) else None


def _group_of(item: pytest.Item) -> tuple[str, ...]:
    case = _case_of(item)
    if case is None:
        return ()
    build, world_size = case.group
    return build.device, build.path, build.flavour, str(world_size)

"""The tree of errors is the one in the docstring, and handlers of builtins see it."""

from __future__ import annotations

import builtins
import copy
import errno
import pickle
import re

import pytest

from tierstore import errors
from tierstore.errors import TierStoreError

# Class, builtin that it also is, in the order of the docstring.
TREE = re.findall(r"^    [├└]── (\w+) +\((\w+)\)", errors.__doc__ or "", re.MULTILINE)
CLASSES = [getattr(errors, name) for name in errors.__all__]


def test_docstring_shows_the_tree() -> None:
    drawn = re.findall(r"[├└]── (\w+)", errors.__doc__ or "")
    assert [name for name, _ in TREE] == drawn
    assert sorted([*drawn, "TierStoreError"]) == errors.__all__


@pytest.mark.parametrize(("name", "builtin"), TREE)
def test_each_error_is_also_the_builtin_that_it_claims(name: str, builtin: str) -> None:
    kind = getattr(errors, name)
    assert kind.__bases__ == (TierStoreError, getattr(builtins, builtin))
    assert kind.__doc__


@pytest.mark.parametrize("kind", CLASSES)
def test_one_handler_catches_all(kind: type[TierStoreError]) -> None:
    with pytest.raises(TierStoreError, match="what and where"):
        raise kind("what and where")


def test_no_error_is_another_one() -> None:
    leaves = [kind for kind in CLASSES if kind is not TierStoreError]
    for kind in leaves:
        assert [other for other in leaves if issubclass(kind, other)] == [kind]


def test_every_error_of_the_module_is_in_the_tree() -> None:
    defined = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, Exception)
    }
    assert defined == set(errors.__all__)


def test_kinds_are_stable_words() -> None:
    assert {kind.__name__: kind.kind for kind in CLASSES} == {
        "BackendUnavailableError": "unavailable",
        "CapacityError": "capacity",
        "ConfigError": "config",
        "CorruptError": "corrupt",
        "LayoutError": "layout",
        "OptimizerError": "optimizer",
        "PeerError": "peer",
        "StateError": "state",
        "TierStoreError": "error",
        "TransferError": "transfer",
        "TransferTimeoutError": "timeout",
    }
    assert len({kind.kind for kind in CLASSES}) == len(CLASSES)


@pytest.mark.parametrize("kind", [errors.CapacityError, errors.TransferError])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.ENOENT, errno.ETIMEDOUT])
def test_errno_is_kept(kind: type[OSError], number: int) -> None:
    error = kind(number, "writing /store/c/0", "/store/c/0")
    assert type(error) is kind  # OSError itself would turn into FileNotFoundError and the like
    assert (error.errno, error.strerror) == (number, "writing /store/c/0")
    assert error.filename == "/store/c/0"
    assert f"[Errno {number}] writing /store/c/0" in str(error)


def test_a_timeout_is_an_os_error_too() -> None:
    with pytest.raises(OSError, match="10 s"):
        raise errors.TransferTimeoutError("did not come back within 10 s")
    assert errors.TransferTimeoutError(errno.ETIMEDOUT, "late").errno == errno.ETIMEDOUT


@pytest.mark.parametrize("kind", CLASSES)
def test_errors_travel_between_processes(kind: type[TierStoreError]) -> None:
    error = kind(errno.EIO, "reading") if issubclass(kind, OSError) else kind("reading")
    error.add_note("rank 3")
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is kind
        assert again.args == error.args
        assert str(again) == str(error)
        assert getattr(again, "errno", None) == getattr(error, "errno", None)
        assert again.__notes__ == ["rank 3"]

"""The nvme tier: the conformance suite, and what is its own."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

from tierstore.backends.posix import PosixStore
from tierstore.testing.conformance import TierStoreTests
from tierstore.testing.stateful import store_machine


class TestNvme(TierStoreTests):
    store_class = PosixStore


TestNvmeModel = store_machine(PosixStore).TestCase
TestNvmeModel.settings = settings(
    max_examples=15,
    stateful_step_count=20,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)

"""The cpu tier: the conformance suite, and what is its own."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

from tierstore.backends.pinned import PinnedStore
from tierstore.testing.conformance import TierStoreTests
from tierstore.testing.stateful import store_machine


class TestCpu(TierStoreTests):
    store_class = PinnedStore


TestCpuModel = store_machine(PinnedStore).TestCase
TestCpuModel.settings = settings(
    max_examples=25,
    stateful_step_count=20,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)

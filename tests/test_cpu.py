"""The cpu tier: the conformance suite, and what is its own."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

from tierstore.backends.pinned import PinnedStore
from tierstore.config import TierConfig
from tierstore.device import CpuDevice
from tierstore.errors import ConfigError
from tierstore.records import Identity
from tierstore.testing.conformance import TierStoreTests, make_optimizer
from tierstore.testing.stateful import store_machine


def test_a_cap_below_the_state_is_refused_with_the_number() -> None:
    config = TierConfig(tier="cpu", host_memory_nbytes=100_000)
    with PinnedStore(config, CpuDevice(), Identity(nonce="x")) as store:
        store.allocate([make_optimizer(numel=8 * 1024)])
        assert store.host_nbytes <= 100_000
    with (
        PinnedStore(config, CpuDevice(), Identity(nonce="x")) as store,
        pytest.raises(ConfigError, match="the state is 110,592 bytes"),
    ):
        store.allocate([make_optimizer(numel=8 * 1024 + 1)])


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

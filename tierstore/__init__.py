"""Optimizer state on another tier, streamed through a small window of device memory.

The core imports no torch, no zarr and no framework at import time.
"""

from __future__ import annotations

import logging

from tierstore.config import TierConfig
from tierstore.layout import Extent, Shard, StateLayout
from tierstore.registry import available_tiers
from tierstore.store import TierStore

__all__ = ["Extent", "Shard", "StateLayout", "TierConfig", "TierStore", "available_tiers"]

logging.getLogger("tierstore").addHandler(logging.NullHandler())

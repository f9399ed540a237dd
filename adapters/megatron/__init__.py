"""Megatron-core's ``DistributedOptimizer`` with its state on a tier.

>>> from tierstore.adapters import megatron as tiers
>>> parser = tiers.add_arguments(argparse.ArgumentParser())  # doctest: +SKIP
>>> handle = tiers.attach(optimizer, tiers.config_from_args(args))  # doctest: +SKIP
"""

from __future__ import annotations

from tierstore.adapters.megatron.arguments import add_arguments, config_from_args
from tierstore.adapters.megatron.attach import Handle, attach

__all__ = ["Handle", "add_arguments", "attach", "config_from_args"]

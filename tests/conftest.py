"""How hypothesis draws examples in every test."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# The same examples in every run, and no verdict that depends on how busy the machine is.
settings.register_profile(
    "tierstore",
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("tierstore")

"""Which processors are near a device."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["cpus_near", "parse_cpus"]

_SYS = Path("/sys")


def cpus_near(device: torch.device, sys: Path = _SYS) -> set[int] | None:
    """Processors of the NUMA node that a CUDA device is attached to.

    A thread on one of them gets its fresh pages from that node's memory, which is the one that the
    device reaches without a hop.

    Returns
    -------
    set of int or None
        Those that this process may use; None where the machine does not say.
    """
    if device.type != "cuda":
        return None
    import torch

    properties: Any = torch.cuda.get_device_properties(device)
    # Older releases of torch do not tell where the device is, and virtual machines often not
    # which node that is near to.
    with contextlib.suppress(AttributeError, OSError, ValueError):
        address = (
            f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:"
            f"{properties.pci_device_id:02x}.0"
        )
        node = int((sys / "bus/pci/devices" / address / "numa_node").read_text())
        if node >= 0:
            listed = (sys / f"devices/system/node/node{node}/cpulist").read_text()
            return parse_cpus(listed) & os.sched_getaffinity(0) or None
    return None


def parse_cpus(listed: str) -> set[int]:
    """Read the kernel's way of listing processors.

    Examples
    --------
    >>> sorted(parse_cpus("0-2,8"))
    [0, 1, 2, 8]
    """
    cpus: set[int] = set()
    for part in filter(None, listed.strip().split(",")):
        first, _, last = part.partition("-")
        cpus |= set(range(int(first), int(last or first) + 1))
    return cpus

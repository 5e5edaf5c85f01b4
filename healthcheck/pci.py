"""PCI addresses in the one spelling that sysfs and /proc/driver/nvidia use: "0000:1b:00.0".

The kernel's Xid lines leave the function out (0000:1b:00) and NVML writes eight digits of domain (00000000:1B:00.0).
"""

from __future__ import annotations

import re

PATTERN = r"(?:[0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?:\.[0-7])?"
_ADDRESS = re.compile(r"(?:([0-9a-fA-F]{4,8}):)?([0-9a-fA-F]{2}):([0-9a-fA-F]{2})(?:\.([0-7]))?")


def normalise_pci(address: str) -> str:
    """Domain of four digits (more only where it needs them), lower case, with the function. ValueError: no address."""
    found = _ADDRESS.fullmatch(address.strip())
    if found is None:
        raise ValueError(f"{address!r} is no PCI address like 0000:1b:00.0")
    domain, bus, device, function = found.groups()
    return f"{int(domain or '0', 16):04x}:{bus.lower()}:{device.lower()}.{function or '0'}"

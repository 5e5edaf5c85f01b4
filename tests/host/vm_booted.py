"""The state of a machine just after its first boot, so that the next one need not boot under software emulation.

An entry of the cache holds disk.qcow2 (on top of the image's disk) and state (memory and devices, as qemu migrates
them), per image, qemu version and machine. With KVM a boot is fast, and the state would depend on this machine's CPU:
there is none then. APPLIANCE_TEST_COLD_BOOT=1 boots every machine.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.host import qemu
from tests.host.roots import cached, digest
from tests.host.vm_image import Image


def find(image: Image, options: Mapping[str, Any]) -> Path | None:
    """The directory of the saved state for vm.py:Machine(image, **options), made where it is absent; None: boot."""
    command = qemu.command_line(image.directory(), Path("/machine"), Path("/qmp"), **options)
    if os.environ.get("APPLIANCE_TEST_COLD_BOOT") == "1" or "kvm" in command:
        return None

    def build(directory: Path) -> None:
        from tests.host.vm import Machine  # which imports this module

        with Machine(image, cold=True, **options) as machine:
            machine.wait_running()
            machine.run("journalctl --sync; sync")
            machine.save(directory)

    return cached(f"{image.name}-up", digest([image.digest(), qemu.version(), command]), build)

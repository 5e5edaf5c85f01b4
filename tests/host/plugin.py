"""The test hosts for pytest: fixtures, when they are skipped, and what they add to the report of a failed test.

Loaded by tests/conftest.py, so every folder has them. Tests that use `box` or `new_box` are marked `box`, those that
use a machine `vm`. Where this machine cannot have such a host they are skipped with the reason; with
APPLIANCE_REQUIRE_HOSTS=1 that is a failure.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.host import evidence
from tests.host.box import BOX, Box, why_no_box
from tests.host.qemu import why_no_qemu
from tests.host.roots import HostError, Recipe, is_cached, root_filesystem
from tests.host.vm import Machine
from tests.host.vm_image import Image

HOST_SECONDS = 1500  # of a test that may have to build its host first
_FIXTURES = {"box": ("box", "new_box", "box_root"), "vm": ("vm", "new_machine", "vm_image")}

NewBox = Callable[..., Box]
NewMachine = Callable[..., Machine]


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for marker, fixtures in _FIXTURES.items():
            if not set(fixtures).isdisjoint(getattr(item, "fixturenames", ())):
                item.add_marker(marker)
                if item.get_closest_marker("xdist_group") is None:
                    item.add_marker(pytest.mark.xdist_group(marker))  # one at a time: one worker has them
                if item.get_closest_marker("timeout") is None:
                    item.add_marker(pytest.mark.timeout(HOST_SECONDS))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Journals and consoles of the hosts that live now, under the traceback of what failed."""
    report = yield
    if report.failed:
        report.sections += evidence.collect(shared="vm" in getattr(item, "fixturenames", ()))
    elif report.when == "teardown":
        evidence.forget()
    return report


def require(reason: str | None) -> None:
    """Skips with the reason, if there is one; fails where hosts are wanted."""
    if reason is None:
        return
    if os.environ.get("APPLIANCE_REQUIRE_HOSTS") == "1":
        pytest.fail(f"no test host: {reason}", pytrace=False)
    pytest.skip(f"no test host: {reason}")


def root_for(recipe: Recipe) -> Path:
    """The root of a recipe, built if need be; skips when APPLIANCE_OFFLINE is set and it is not there yet."""
    if os.environ.get("APPLIANCE_OFFLINE") and not is_cached(recipe.name, recipe.digest()):
        pytest.skip(f"APPLIANCE_OFFLINE is set and the root {recipe.name!r} is not in the cache")
    try:
        return root_filesystem(recipe)
    except HostError as error:  # no mirror, no room, no mounts: not a fault of what is tested
        require(f"the root {recipe.name!r} cannot be built: {error}")
        raise


@pytest.fixture(scope="session")
def box_root() -> Path:
    """The root that boxes start from: systemd, D-Bus, python3 with gi and pydbus, iptables, nft, conntrack, ip."""
    require(why_no_box())
    return root_for(BOX)


@pytest.fixture
def new_box(box_root: Path) -> Iterator[NewBox]:
    """Boxes with options of their own: `new_box(bind=[...], environment={...})`; each is booted, and stopped at the
    end of the test. `root=` takes another root (root_for(Recipe(...)))."""
    with ExitStack() as boxes:

        def make(*, root: Path | None = None, **options: Any) -> Box:
            return boxes.enter_context(Box(root or box_root, **options))

        yield make


@pytest.fixture
def box(new_box: NewBox) -> Box:
    """A fresh box for this test."""
    return new_box()


@pytest.fixture(scope="session")
def vm_image() -> Image:
    """The disk that machines start from: a bare Debian 12 server, without anything that the appliance brings."""
    require(why_no_qemu())
    image = Image()
    if os.environ.get("APPLIANCE_OFFLINE") and not is_cached(image.name, image.digest()):
        pytest.skip("APPLIANCE_OFFLINE is set and the machine's disk is not in the cache")
    try:
        image.directory()
    except HostError as error:
        require(f"the machine's disk cannot be built: {error}")
    return image


@pytest.fixture
def new_machine(vm_image: Image) -> Iterator[NewMachine]:
    """Machines of this test alone, for crash tests and installs: `new_machine(memory=3072)`; each is booted, and its
    disk is removed at the end of the test."""
    with ExitStack() as machines:

        def make(*, image: Image | None = None, **options: Any) -> Machine:
            return machines.enter_context(Machine(image or vm_image, **options))

        yield make


@pytest.fixture(scope="session")
def vm(vm_image: Image) -> Iterator[Machine]:
    """One machine for all tests that leave it as they found it."""
    with Machine(vm_image) as machine:
        machine.evidence.shared = True
        yield machine

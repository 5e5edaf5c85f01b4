"""For all tests: the test hosts' fixtures and reports."""

from __future__ import annotations

pytest_plugins = ["tests.host.plugin"]

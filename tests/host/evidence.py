"""What a test host has to say when a test fails: plugin.py puts it into the report."""

from __future__ import annotations

from collections.abc import Callable

_living: list[Evidence] = []
_kept: list[tuple[str, str]] = []


class Evidence:
    """A title and a way to read the text from the host while that is alive. `shared`: by tests that may not use it."""

    def __init__(self, title: str, read: Callable[[], str]) -> None:
        self.title, self._read = title, read
        self.shared = False

    def live(self) -> None:
        _living.append(self)

    def gone(self) -> None:
        if self in _living:
            _living.remove(self)

    def keep(self) -> None:
        """The host is about to go because something failed: remember its text for the report."""
        if self in _living:
            _kept.append((self.title, self.text()))

    def text(self) -> str:
        try:
            return self._read()
        except Exception as error:
            # The test's own failure must be reported whatever state its host is in.
            return f"could not be read: {error!r}"


def collect(shared: bool) -> list[tuple[str, str]]:
    """Titles and texts of the living hosts, the shared ones only if asked for, and of those that went since the last
    call because something failed."""
    living = [evidence for evidence in _living if shared or not evidence.shared]
    found = [*_kept, *((evidence.title, evidence.text()) for evidence in living)]
    _kept.clear()
    return found


def forget() -> None:
    _kept.clear()

"""From when to when the certificate of the gateways is valid.

The ssl module has no public reader of certificate files, openssl(1) is not on every host and `cryptography` is no
dependency of ours: so the two ends of a TLS connection in memory shake hands, and we see what a client would be shown.
"""

from __future__ import annotations

import contextlib
import ssl
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SOON_DAYS = 14
_NO_CHECK_TIME = 0x200000  # X509_V_FLAG_NO_CHECK_TIME, X509_VERIFY_PARAM_set_flags(3); ssl has no name for it
_MAX_FLIGHTS = 10  # of a handshake; TLS 1.3 takes three


@dataclass(frozen=True, slots=True)
class Validity:
    """Of one certificate, in UTC seconds."""

    subject: str
    begins: float
    ends: float


class CertificateError(Exception):
    """No client would take this certificate, whatever the time."""


def validities(context: ssl.SSLContext, certificate: Path) -> list[Validity]:
    """Of the certificate that `context` (of a server) shows, and of the authorities in the same file."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | _NO_CHECK_TIME
    client.load_verify_locations(cafile=certificate)  # it is trusted here: only its dates are looked at
    shown = [_shown(context, client), *client.get_ca_certs()]
    return list(dict.fromkeys(_validity(found) for found in shown))


def _shown(server: ssl.SSLContext, client: ssl.SSLContext) -> dict[str, Any]:
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours, theirs = server.wrap_bio(there, back, server_side=True), client.wrap_bio(back, there)
    try:
        for _ in range(_MAX_FLIGHTS):
            for end in (theirs, ours):
                with contextlib.suppress(ssl.SSLWantReadError):
                    end.do_handshake()
    except ssl.SSLError as error:
        raise CertificateError(getattr(error, "verify_message", "") or error.reason or str(error)) from None
    return theirs.getpeercert() or {}


def _validity(found: dict[str, Any]) -> Validity:
    names = {key: value for part in found.get("subject", ()) for key, value in part}
    subject = names.get("commonName") or names.get("organizationName") or "without a name"
    return Validity(subject, *(float(ssl.cert_time_to_seconds(found[key])) for key in ("notBefore", "notAfter")))


def problem_of_dates(found: Iterable[Validity], now: float) -> str | None:
    """What a client would object to at `now`: "expired on ..."; None where all are valid."""
    for one in found:
        if now > one.ends:
            return f"{one.subject!r} expired on {_date(one.ends)}"
        if now < one.begins:
            return f"{one.subject!r} is not valid before {_date(one.begins)}"
    return None


def ends_soon(found: Iterable[Validity], now: float) -> str | None:
    """Whether one ends within SOON_DAYS."""
    first = min(found, key=lambda one: one.ends)
    days = (first.ends - now) / 86400
    return f"{first.subject!r} expires on {_date(first.ends)}, in {days:.0f} days" if days <= SOON_DAYS else None


def _date(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(moment))

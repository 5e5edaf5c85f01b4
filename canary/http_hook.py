"""`python -P -m canary.http_hook URL SECONDS`: POSTs $CANARY_EVENT as JSON. A process of its own, so that a server that
drips is cut off by one limit for all of it. Exit code 0: 2xx; 3: not yet, or no answer; 1: no."""

from __future__ import annotations

import os
import sys
import urllib.error
import urllib.request

from appliance.log import ExitCode

_NOT_YET = (408, 409, 425, 429, 500, 502, 503, 504)  # a broken gate knows nothing, so it says neither yes nor no


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: object, **__: object) -> None:
        """A redirect is no answer of the gate itself."""


def main(url: str, seconds: float) -> int:
    body = os.environ.get("CANARY_EVENT", "{}").encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"}, method="POST")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect())
    try:
        with opener.open(request, timeout=seconds) as response:
            return ExitCode.DONE if 200 <= response.status < 300 else ExitCode.FAILED
    except urllib.error.HTTPError as error:
        print(f"HTTP status {error.code}")
        return ExitCode.INCONCLUSIVE if error.code in _NOT_YET else ExitCode.FAILED
    except (OSError, urllib.error.URLError) as error:
        print(f"no answer: {getattr(error, 'reason', error)}")
        return ExitCode.INCONCLUSIVE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], float(sys.argv[2])))

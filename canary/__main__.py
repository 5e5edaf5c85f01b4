"""`python -P -m canary`: the controller of runs, as appliance-canary.service runs it."""

from __future__ import annotations

import argparse
import sys

from appliance.log import ApplianceError, report_error
from appliance.paths import Paths
from canary.service import serve
from canary.wiring import real_parts


def main() -> int:
    argparse.ArgumentParser(prog="python -m canary", description=__doc__).parse_args()
    try:
        return serve(Paths.default(), real_parts)
    except ApplianceError as error:
        report_error(error.message, hint=error.hint)
        return int(error.exit_code)


if __name__ == "__main__":
    sys.exit(main())

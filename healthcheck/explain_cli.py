"""`healthcheck explain`: what the policy of this host does on a signal, and why."""

from __future__ import annotations

import argparse

from appliance.arguments import add_common, set_epilog
from appliance.log import ExitCode, UsageError, emit_json
from appliance.paths import Paths
from healthcheck.policy import Policy, PolicyError, action_name, load_policy, normalise_key

EPILOG = """\
examples:
  healthcheck explain 79                Xid 79
  healthcheck explain ecc:uncorrected
  healthcheck explain                   every rule, a line each
exit codes: 0, 2 it is no signal, 4 the policy cannot be used
JSON: {"schema": 1, "key", "pattern", "action", "needs", "title", "note", "source", "lines"}, or {"rules": [...]}
"""


def configure(parser: argparse.ArgumentParser, common: argparse.ArgumentParser) -> None:
    add_common(parser)
    set_epilog(parser, EPILOG)
    parser.add_argument("key", nargs="*", metavar="KEY", help='a signal: 79, "Xid 79", xid:79, golden:mismatch')


def run(args: argparse.Namespace) -> int:
    policy = load_policy(Paths.default().healthcheck_config)
    if not args.key:
        return _all(policy, args.json)
    try:
        key = normalise_key(" ".join(args.key))
    except PolicyError as error:
        raise UsageError(error.message, hint=error.hint) from None
    rule, lines = policy.rule(key), policy.explain(key)
    if args.json:
        emit_json({
            "schema": 1, "key": key, "pattern": rule.pattern, "action": action_name(rule.action),
            "needs": str(rule.needs), "title": rule.title, "note": rule.note, "source": rule.source, "lines": lines,
        })  # fmt: skip
    else:
        print("\n".join(lines))
    return ExitCode.DONE


def _all(policy: Policy, as_json: bool) -> int:
    rows = [
        {"pattern": rule.pattern, "action": action_name(rule.action), "title": rule.title}
        for rule in policy.rules.values()
    ]
    if as_json:
        emit_json({"schema": 1, "rules": rows})
        return ExitCode.DONE
    width = max(len(row["pattern"]) for row in rows)
    for row in rows:
        print(f"{row['pattern']:{width}}  {row['action']:15}  {row['title']}")
    return ExitCode.DONE

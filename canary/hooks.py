"""Commands and URLs of the admin that are told of a run, and may stop it.

    [[hooks]]
    when = "step"                      # pre, step, promote: gates; rollback, post: told only
    exec = ["/usr/local/bin/gate"]     # or url = "http://127.0.0.1:9000/gate"
    timeout = 30

Both get the run as JSON: a command in $CANARY_EVENT (and RUN, RELEASE, STABLE, PHASE, STEP, WEIGHT, each with CANARY_
before it), a URL as the body of a POST. A gate says go (exit 0, HTTP 2xx), not yet (exit 3 or a time-out; 408, 409,
425, 429, 5xx or no answer) or no (anything else: rolled back). A hook may be called again after a restart of the
controller: CANARY_KEY names the occasion. Told hooks run after the weight is 0 and never delay
it; what they answer is an event.
"""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from appliance.command import run as run_command
from appliance.log import ExitCode, UsageError
from canary.outcome import Result, fail, ok, wait
from canary.run import Hook, HookPoint, Run
from engine.spawn import python_env, python_module

NOT_YET = int(ExitCode.INCONCLUSIVE)
_MAX_WORDS = 300
_URL_GRACE = 5.0  # for the child itself to start and end


def check_hook(hook: Hook) -> Hook:
    """UsageError for one that could never run."""
    if bool(hook.exec) == (hook.url is not None):
        raise UsageError(f"a hook of {hook.when} needs either exec or url")
    if hook.exec and not hook.exec[0].startswith("/"):
        raise UsageError(f"hook {hook.exec[0]!r} is no absolute path", hint="the controller has a PATH of its own")
    if hook.url is not None and not hook.url.startswith(("http://", "https://")):
        raise UsageError(f"hook {hook.url!r} is neither http:// nor https://")
    if hook.exec and not Path(hook.exec[0]).exists():
        raise UsageError(f"hook {hook.exec[0]} is not there")
    return hook


def payload(run: Run, when: HookPoint) -> str:
    """One line of JSON."""
    value = {
        "schema": 1, "hook": when, "key": run.job_key, "run": run.id, "release": run.release, "stable": run.stable,
        "phase": str(run.phase), "step": run.step, "steps": run.policy.steps, "weight": run.weight,
        "next_weight": run.target, "ending": run.ending, "reason": run.reason,
        "verdict": msgspec.to_builtins(run.verdict) if run.verdict else None,
    }  # fmt: skip
    return json.dumps(value)


def call(run: Run, when: HookPoint) -> Result:
    """All hooks of that point, in order. Of gates, the first that does not say go ends it."""
    gate = when in ("pre", "step", "promote")
    words = []
    for hook in run.hooks:
        if hook.when != when:
            continue
        result = _call(hook, run, when)
        if gate and result.outcome != "ok":
            return result
        if result.outcome != "ok":
            words.append(result.text)
    return ok("; ".join(words))


def _call(hook: Hook, run: Run, when: HookPoint) -> Result:
    text = payload(run, when)
    environ = {
        "CANARY_EVENT": text, "CANARY_HOOK": when, "CANARY_KEY": run.job_key, "CANARY_RUN": run.id,
        "CANARY_RELEASE": run.release, "CANARY_STABLE": run.stable, "CANARY_PHASE": str(run.phase),
        "CANARY_STEP": str(run.step), "CANARY_WEIGHT": f"{run.weight:g}",
    }  # fmt: skip
    argv, timeout, name = hook.exec, hook.timeout, " ".join(hook.exec)
    if hook.url is not None:
        argv = [*python_module("canary.http_hook"), hook.url, f"{hook.timeout:g}"]
        environ |= {key: value for key, value in python_env().items() if key == "PYTHONPATH"}
        timeout, name = hook.timeout + _URL_GRACE, hook.url
    done = run_command(argv, timeout=timeout, limit=64 << 10, environ=environ)
    said = (done.stdout + done.stderr).decode(errors="replace").strip().splitlines()
    words = f"hook {when} ({name}) " + (f"says: {said[-1][:_MAX_WORDS]}" if said else done.why())
    if done.ok:
        return ok()
    if done.timed_out or done.code == NOT_YET:
        return wait(words if said and not done.timed_out else f"hook {when} ({name}): not yet")
    return fail(words)

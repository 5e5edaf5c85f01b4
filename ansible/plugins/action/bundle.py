# Copyright: the LLM appliance maintainers
# SPDX-License-Identifier: Apache-2.0
"""The controller's half of appliance.host.bundle: reads and checks the bundle, and copies it where it is needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase
from ansible_collections.appliance.host.plugins.module_utils.installation import (
    InstallError,
    read_checked_manifest,
)


class ActionModule(ActionBase):  # type: ignore[misc]
    """Two rounds at most: ask the host, and if it lacks the version, copy and ask again."""

    TRANSFERS_FILES = True

    def run(self, tmp: None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        args = dict(self._task.args)
        source = args.pop("src", None)
        if source and args.get("version"):
            raise AnsibleActionFail("give src or version, not both")
        if source:
            bundle = Path(self._find_needle("files", str(source)))
            try:
                args["manifest"] = read_checked_manifest(bundle).decode()
            except (InstallError, OSError) as error:
                raise AnsibleActionFail(str(error)) from None
        result: dict[str, Any] = self._ask(args, task_vars)
        if source and result.get("need_bundle"):
            self._make_tmp_path()
            try:
                remote = self._connection._shell.join_path(self._connection._shell.tmpdir, "bundle.tar")
                self._transfer_file(str(bundle), remote)
                self._fixup_perms2((self._connection._shell.tmpdir, remote))
                result = self._ask({**args, "src": remote}, task_vars)
            finally:
                self._remove_tmp_path(self._connection._shell.tmpdir)
        return result

    def _ask(self, args: dict[str, Any], task_vars: dict[str, Any] | None) -> dict[str, Any]:
        answer: dict[str, Any] = self._execute_module("appliance.host.bundle", args, task_vars=task_vars)
        return answer

"""What all commands share: help at once, man page and completion from the parser, logs and version."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from host_trees import OPEN_VERSION, add_release, make_dirs, put

from appliance import logs_cli, version_cli
from appliance.cli import COMMANDS, main
from appliance.completion_cli import script
from appliance.hostconfig import SECTIONS
from appliance.log import UsageError
from appliance.parser_tree import PROGRAMS, Node, tree
from appliance.paths import Paths
from tests.programs import need

REPO = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def root() -> Node:
    return tree()


def test_help_imports_nothing_of_the_commands() -> None:
    """`appliance --help` and a TAB must be instant: the interpreter and argparse, nothing else."""
    code = "import sys; from appliance.cli import main; main(['--help'])"
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", code], capture_output=True, text=True, cwd=REPO, timeout=60
    )
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if "|" in line}
    ours = {name for name in imported if name.startswith(("appliance.", "engine", "kernels"))}
    assert ours - {"engine"} == {"appliance.cli", "appliance.log", "appliance.arguments"}  # engine: the version
    assert not imported & {"msgspec", "aiohttp", "numpy", "asyncio", "subprocess", "http.client", "tomllib"}
    assert all(f"\n    {command.name}" in done.stdout for command in COMMANDS)


def test_status_stays_light() -> None:
    code = (
        "import sys; from appliance.cli import main; main(['status', '--json']); print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPO, timeout=60)
    assert "appliance.status" in done.stderr.split()
    assert not {"msgspec", "aiohttp", "numpy", "asyncio"} & set(done.stderr.split())


@pytest.mark.parametrize("command", [command.name for command in COMMANDS])
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    assert stopped.value.code == 0 and f"usage: appliance {command}" in capsys.readouterr().out


def test_every_command_that_has_a_result_has_json(root: Node) -> None:
    without = {" ".join(node.path[1:]) for node in root.walk() if not node.children} - {
        " ".join(node.path[1:]) for node in root.walk() for a in node.arguments if "--json" in a.flags
    }
    assert without == {"serve", "completion", "man"}


def test_every_argument_is_explained(root: Node) -> None:
    known = {"--host", "--port", "--backend", "--until", "NAME", "shell", "--page"}  # their names say it
    for node in root.walk():
        for argument in node.arguments:
            assert argument.help or {argument.metavar, *argument.flags} & known or argument.choices, (
                node.path,
                argument,
            )


# -- man


def groff(page: str) -> str:
    need("groff", "groff-base")
    done = subprocess.run(
        ["groff", "-man", "-Tutf8", "-ww", "-P-c", "-rLL=200n"], input=page, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    plain = ""
    for char in done.stdout:  # overstrikes: bold and underline of terminals from the time of paper
        plain = plain[:-1] if char == "\b" else plain + char
    return plain


def test_the_man_page_is_valid_troff_with_every_option(root: Node, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["man"]) == 0
    page = capsys.readouterr().out
    shown = groff(page)
    for node in root.walk():
        assert " ".join(node.path) in shown
        for argument in node.arguments:
            assert all(flag in shown for flag in argument.flags), (node.path, argument)
    assert "\\-\\-json" in page  # an option that one can copy: plain hyphens become typographic ones elsewhere
    assert "exit codes: 0 done, 1 failed" in shown and "/etc/appliance/appliance.toml" in shown
    main(["man"])
    assert capsys.readouterr().out == page  # the same bytes each time


def test_the_page_of_the_configuration_has_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["man", "--page", "5"]) == 0
    shown = groff(capsys.readouterr().out)
    for section, table in SECTIONS.items():
        assert f"[{section}]" in shown and all(key in shown for key in table.__struct_fields__)
    assert "GPU's NUMA node" in shown and "Default: 127.0.0.1" in shown


def test_the_man_page_of_canary(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["man", "--program", "canary"]) == 0
    shown = " ".join(groff(capsys.readouterr().out).split())  # long usage lines are broken
    assert shown.startswith("CANARY(8)") and "appliance(8)" in shown and "/etc/appliance/canary.toml" in shown
    for node in tree("canary").walk():
        assert " ".join(node.path) in shown
        for argument in node.arguments:
            assert all(flag in shown for flag in argument.flags), (node.path, argument)
    assert main(["man", "--program", "canary", "--page", "5"]) == 2


def test_man_takes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    need("man", "man-db")
    main(["man"])
    page = tmp_path / "appliance.8"
    page.write_text(capsys.readouterr().out)
    environ = os.environ | {"LC_ALL": "C.UTF-8", "MANPAGER": "cat", "MANWIDTH": "80"}
    done = subprocess.run(
        ["man", "--warnings=all", "-l", str(page)], capture_output=True, text=True, env=environ, timeout=60
    )
    if "has been minimized" in done.stdout:
        pytest.skip("this system has no man pages")
    assert (done.returncode, done.stderr) == (0, "") and "APPLIANCE(8)" in done.stdout


# -- completion


@pytest.fixture(scope="module")
def scripts(root: Node, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Both scripts, with the host's directories moved below a temporary one."""
    host = tmp_path_factory.mktemp("host")
    paths, written = Paths.under(host), {}
    make_dirs(paths)
    for gpu in (0, 1, 10):
        paths.gpu_run(gpu).mkdir()
    (paths.models / "tiny").mkdir()
    for shell in ("bash", "zsh"):
        text = script(root, shell)
        for place in ("/run/appliance", "/var/lib/appliance", "/srv/appliance"):
            text = text.replace(f" {place}", f" {host}{place}")
        written[shell] = host / shell
        written[shell].write_text(text)
    return written


def complete(scripts: dict[str, Path], shell: str, *words: str, program: str = "appliance") -> list[str]:
    """What `shell` offers for the last of `words`."""
    need(shell)
    quoted = " ".join(f"'{word}'" for word in (program, *words))
    if shell == "bash":
        code = f"""source {scripts["bash"]}; COMP_WORDS=({quoted}); COMP_CWORD={len(words)}; _{program}
            printf '%s\\n' "${{COMPREPLY[@]}}" """
        argv = ["bash", "--norc", "-euc", code]
    else:
        # compadd and _files belong to the line editor: what it would be given is printed instead.
        code = f"""compadd() {{ shift; print -rl -- "$@" }}; _files() {{ print -r -- FILES "$@" }}
            words=({quoted}); CURRENT={len(words) + 1}; source {scripts["zsh"]}"""
        argv = ["zsh", "-fc", code]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, cwd=scripts[shell].parent)
    assert (done.returncode, done.stderr) == (0, "")
    return sorted(word for word in done.stdout.split("\n") if word.startswith(words[-1]) and word)


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_offers_what_may_come(scripts: dict[str, Path], shell: str) -> None:
    def offered(*words: str) -> list[str]:
        return complete(scripts, shell, *words)

    assert {command.name for command in COMMANDS} <= set(offered(""))
    assert offered("dra") == ["drain"] and offered("--jso") == ["--json"]
    assert offered("model", "") == ["--help", "-h", "add", "list", "pull", "remove", "verify"]
    assert offered("drain", "") == ["0", "1", "10"] == offered("drain", "--wait", "1", "")
    assert offered("drain", "--reason", "model", "") == ["0", "1", "10"]  # the value of an option is no command
    assert offered("drain", "--re") == ["--reason"]
    assert offered("doctor", "--only", "") == ["install", "kernel", "nvidia", "releases", "system", "watchdog"]
    assert offered("logs", "--gpu", "") == ["0", "1", "10"] and offered("logs", "--gateway", "c") == ["canary"]
    assert offered("model", "remove", "") == ["tiny"]
    assert offered("completion", "") == ["bash", "zsh"]
    assert offered("--json", "status", "--w") == ["--watch"]
    assert offered("config", "check", "") == (
        ["FILES"] if shell == "zsh" else sorted(path.name for path in scripts["bash"].parent.iterdir())
    )


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_of_canary(tmp_path: Path, shell: str) -> None:
    names = tmp_path / "var/lib/appliance"
    (names / "releases/v2").mkdir(parents=True)
    (names / "canary-runs").mkdir()
    (names / "canary-runs/17.json").touch()
    text = script(tree("canary"), shell)
    (tmp_path / shell).write_text(text.replace(" /var/lib/appliance", f" {names}"))

    def offered(*words: str) -> list[str]:
        return complete({shell: tmp_path / shell}, shell, *words, program="canary")

    assert {"start", "status", "rollback", "explain"} <= set(offered(""))
    assert offered("start", "") == ["v2"] and offered("start", "--man") == ["--manual"]
    assert offered("explain", "") == ["17"] and offered("undo", "--to", "") == ["17"]
    assert offered("start", "v2", "--on-inconclusive", "") == ["extend", "hold", "rollback"]


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_scripts_are_clean(tmp_path: Path, shell: str, program: str) -> None:
    file = tmp_path / "script"
    file.write_text(script(tree(program), shell))
    subprocess.run([need(shell), "-n", str(file)], check=True, timeout=60)
    if shell == "bash":
        need("shellcheck")
        done = subprocess.run(["shellcheck", "-s", "bash", str(file)], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout


# -- logs


def journalctl(*arguments: str) -> list[str]:
    parser = argparse.ArgumentParser()
    logs_cli.configure(parser, parser)
    args = parser.parse_args(arguments)
    args.json = getattr(args, "json", False)
    return logs_cli.journalctl(args)


def test_logs_is_journalctl_of_our_units() -> None:
    assert journalctl("-f") == [
        "journalctl", "--unit=appliance-*", "--unit=appliance.*", "--output=short-iso-precise", "--follow",
    ]  # fmt: skip
    assert journalctl("--gpu", "3", "--since", "1 hour ago")[1:] == [
        "--unit=appliance-gpu@3.service", "--unit=appliance-gpu3-*.scope", "--output=short-iso-precise",
        "--since=1 hour ago",
    ]  # fmt: skip
    assert journalctl("--gateway", "canary", "-n", "5", "--json")[1:] == [
        "--unit=appliance-gateway@canary.service", "--output=json", "--lines=5",
    ]  # fmt: skip
    assert journalctl("--request", "req-1.x")[-2:] == ["--grep=req\\-1\\.x", "--case-sensitive=yes"]


@pytest.mark.parametrize("wrong", [("--gpu", "1", "--gateway", "stable"), ("--request", ".* -x"), ("-n", "0")])
def test_logs_refuses_what_makes_no_sense(wrong: tuple[str, ...]) -> None:
    with pytest.raises(UsageError):
        journalctl(*wrong)


def test_the_real_journalctl_takes_our_options(tmp_path: Path) -> None:
    need("journalctl", "systemd")
    argv = journalctl("--gpu", "3", "--since", "1 hour ago", "--request", "req-1", "-n", "5", "--until", "now")
    done = subprocess.run([*argv, f"--directory={tmp_path}"], capture_output=True, text=True, timeout=60)
    assert "unrecognized" not in done.stderr and "Failed to parse" not in done.stderr, done.stderr


# -- version


def test_version_names_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("APPLIANCE_ROOT", str(tmp_path))
    paths = Paths.under(tmp_path)
    make_dirs(paths)
    add_release(paths, "llama", slot="stable")
    put(tmp_path, "proc/driver/nvidia/version", OPEN_VERSION)
    put(tmp_path, "etc/os-release", 'PRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\nID=debian\n')
    put(tmp_path, "usr/lib/appliance/0.1.0/x", "")
    (paths.lib / "current").symlink_to("0.1.0")
    assert version_cli.run(argparse.Namespace(json=True), tmp_path) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["driver"].startswith("NVIDIA UNIX Open Kernel Module for x86_64  580.82.07")
    assert found["system"] == "Debian GNU/Linux 12 (bookworm)" and found["current"] == "0.1.0" == found["installed"][0]
    assert found["slots"] == {"stable": {"release": "llama", "engine_version": "0.1.0"}, "canary": None}
    assert found["packages"]["msgspec"]
    assert version_cli.run(argparse.Namespace(json=False), tmp_path / "bare") == 0
    assert "driver     none" in capsys.readouterr().out


# -- JSON


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "latin-1"])
def test_json_is_json_in_every_locale(encoding: str) -> None:
    """File names and arguments that are no UTF-8 come as lone surrogates; stdout may be no UTF-8 at all."""
    code = "import os; from appliance.log import emit_json; emit_json({'é扇': os.fsdecode(b'\\xff')})"
    environ = os.environ | {"PYTHONIOENCODING": encoding}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=REPO, env=environ, timeout=60)
    assert json.loads(done.stdout.decode(encoding)) == {"é扇": "\udcff"}, done.stderr


def test_logs_of_a_slot_that_is_not_bound_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """journalctl alone says "-- No entries --" and 0, as for a GPU that is silent."""
    monkeypatch.setenv("APPLIANCE_ROOT", str(tmp_path))
    ran: list[list[str]] = []
    monkeypatch.setattr(logs_cli, "become", ran.append)
    assert main(["logs", "--gpu", "7"]) == 2 and ran == []
    assert "no GPU slot 7" in capsys.readouterr().err
    gpus = tmp_path / "var/lib/appliance/gpus.json"
    gpus.parent.mkdir(parents=True)
    gpus.write_text("{")  # its journal may say why
    main(["logs", "--gpu", "7"])
    assert "gpus.json is not JSON" in capsys.readouterr().err and ran[0][0] == "journalctl"


@pytest.mark.parametrize(
    ("arguments", "prog"),
    [
        (["--nosuch"], "appliance"),
        (["status", "--nosuch"], "appliance status"),
        (["model", "add", "a", "b"], "appliance model add"),
        (["release", "add", "x", "--options", "y"], "appliance release add"),
        (["release", "nosuch"], "appliance release"),
    ],
)
def test_a_usage_error_names_the_help_of_the_verb(
    arguments: list[str], prog: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2 and f"see `{prog} --help`" in capsys.readouterr().err

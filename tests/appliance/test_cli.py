"""The `appliance` command as a user and a script see it: text, JSON, exit codes, terminal."""

from __future__ import annotations

import argparse
import json
import os
import pty
import subprocess
import sys
import types
from pathlib import Path

import pytest
from store_helpers import make_hf_dir

from appliance import __version__
from appliance.cli import Command, main
from appliance.fsutil import locked
from appliance.log import ApplianceError, format_bytes, printable
from engine.options import parse_arguments

REPO = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("APPLIANCE_MODELS", str(tmp_path / "store"))
    return tmp_path / "store"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_hf_dir(tmp_path / "Tiny")


def json_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, object]]:
    """(exit code, the one JSON document on stdout)."""
    capsys.readouterr()
    try:
        code = main(arguments)
    except SystemExit as error:
        code = int(error.code or 0)
    return code, json.loads(capsys.readouterr().out)


def test_life_of_a_model(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "list"]) == 0
    assert "appliance model pull smollm2" in capsys.readouterr().out
    assert main(["model", "add", str(source)]) == 0
    assert main(["model", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2].split() == ["NAME", "SIZE", "FAMILY", "DTYPE", "VERIFIED", "SOURCE"]
    assert lines[-1].split()[0] == "tiny" and lines[-1].split()[3:] == [
        "llama",
        "float32",
        "never",
        "copy",
        "of",
        str(source),
    ]
    assert main(["model", "verify"]) == 0
    assert capsys.readouterr().out.startswith("tiny: ok, 4 files")
    assert main(["model", "list"]) == 0
    assert " never " not in capsys.readouterr().out
    assert main(["model", "remove", "tiny"]) == 0
    assert main(["model", "verify", "tiny"]) == 1


def test_json_everywhere(source: Path, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, added = json_of(capsys, "model", "add", str(source), "--name", "m", "--json")
    assert code == 0 and added["name"] == "m" and added["path"] == str(root / "m") and added["changed"] is True
    for arguments in (("--json", "model", "list"), ("model", "list", "--json")):
        code, listed = json_of(capsys, *arguments)
        assert code == 0 and listed["root"] == str(root)
        (model,) = listed["models"]  # type: ignore[misc]
        assert (model["family"], model["dtype"], model["problem"]) == ("llama", "float32", None)
        assert model["source"] == {"kind": "directory", "mode": "copy", "path": str(source)}
    code, verified = json_of(capsys, "model", "verify", "--json")
    assert code == 0 and verified["ok"] is True
    (root / "m" / "config.json").write_text("{}")
    code, verified = json_of(capsys, "model", "verify", "m", "--json")
    assert code == 1 and verified["ok"] is False
    assert "config.json" in verified["models"][0]["problems"]  # type: ignore[index]
    code, removed = json_of(capsys, "model", "remove", "m", "--json")
    assert code == 0 and removed == {"name": "m", "removed": True}


def test_copy_is_the_default_and_link_is_not(source: Path, root: Path) -> None:
    assert main(["model", "add", str(source), "--name", "a"]) == 0
    assert main(["model", "add", str(source), "--name", "b", "--copy"]) == 0
    assert main(["model", "add", str(source), "--name", "c", "--link"]) == 0
    assert [(root / name / "files").is_symlink() for name in "abc"] == [False, False, True]


def test_verify_goes_on_after_a_bad_model(source: Path, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["model", "add", str(source), "--name", "zz"])
    (root / "broken").mkdir()
    (root / "Bad\x1b[31mName").mkdir()
    assert main(["model", "verify"]) == 1
    out = capsys.readouterr().out
    assert "broken: manifest.json" in out and "zz: ok" in out and "\x1b" not in out


@pytest.mark.parametrize(
    "arguments, code, message",
    [
        (("bogus",), 2, "invalid choice"),
        (("model",), 2, "VERB"),
        (("model", "add"), 2, "DIR"),
        (("model", "list", "--nope"), 2, "--nope"),
        (("model", "pull", "nope"), 2, "catalogue"),
        (("model", "add", "/nonexistent/dir"), 1, "not a directory"),
        (("model", "add", "/", "--copy", "--link"), 2, "not allowed with"),
        (("model", "remove", "nope"), 1, "no model 'nope'"),
        (("model", "verify", "../x"), 2, "cannot name a model"),
    ],
)
def test_errors_say_what_to_do(
    arguments: tuple[str, ...], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, document = json_of(capsys, *arguments, "--json")
    error = document["error"]
    assert status == code == error["exit_code"]  # type: ignore[index]
    assert message in error["message"] and error["hint"]  # type: ignore[index]
    try:
        assert main(arguments) == code
    except SystemExit as stopped:
        assert stopped.code == code
    captured = capsys.readouterr()
    assert captured.out == "" and message in captured.err and "Traceback" not in captured.err


def test_busy_is_5(source: Path, root: Path) -> None:
    main(["model", "add", str(source), "--name", "m"])
    with locked(root / ".locks" / "m.lock", "m"):
        assert main(["model", "remove", "m"]) == 5


def command(run: object) -> Command:
    module = types.ModuleType("appliance_test_command")
    module.run = run  # type: ignore[attr-defined]
    module.configure = lambda parser, common: parser.add_argument("--flag", action="store_true")  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    return Command("extra", "a command of another module", module.__name__)


def test_other_modules_add_commands(capsys: pytest.CaptureFixture[str]) -> None:
    def run(args: argparse.Namespace) -> int:
        print(args.flag, args.json)
        return 3

    assert main(["--json", "extra", "--flag"], [command(run)]) == 3
    assert capsys.readouterr().out == "True True\n"


def test_defects_show_a_traceback_only_with_debug(capsys: pytest.CaptureFixture[str]) -> None:
    def defect(args: argparse.Namespace) -> int:
        raise ZeroDivisionError("oops")

    def expected(args: argparse.Namespace) -> int:
        raise ApplianceError("no luck", hint="try again")

    def interrupted(args: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    assert main(["extra"], [command(defect)]) == 1
    assert "internal error: ZeroDivisionError: oops" in capsys.readouterr().err
    with pytest.raises(ZeroDivisionError):
        main(["--debug", "extra"], [command(defect)])
    assert main(["extra"], [command(expected)]) == 1
    assert capsys.readouterr().err == "error: no luck\nhint: try again\n"
    assert main(["extra"], [command(interrupted)]) == 130


def run_cli(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command_line = [sys.executable, "-m", "appliance", *arguments]
    environment = os.environ | {"COLUMNS": "100"} | environ
    return subprocess.run(
        command_line, capture_output=True, text=True, cwd=REPO, env=environment, timeout=60, check=False
    )


def test_help_and_version() -> None:
    assert run_cli("--version").stdout == f"appliance {__version__}\n"
    text = run_cli("--help").stdout
    assert "exit codes" in text and "model" in text
    assert all(verb in run_cli("model", "--help").stdout for verb in ("pull", "add", "list", "verify", "remove"))
    nothing = run_cli()
    assert nothing.returncode == 2 and nothing.stdout == "" and "usage: appliance" in nothing.stderr


def test_a_reader_that_leaves_is_no_error() -> None:
    """As in `appliance model list | head -0`: the pipe is closed before anything is written."""
    reader, writer = os.pipe()
    os.close(reader)
    command_line = [sys.executable, "-m", "appliance", "model", "list", "--json"]
    result = subprocess.run(command_line, stdout=writer, stderr=subprocess.PIPE, cwd=REPO, timeout=60, check=False)
    os.close(writer)
    assert (result.returncode, result.stderr) == (141, b"")


@pytest.mark.parametrize("arguments", [["version"], ["version", "--json"]], ids=" ".join)
def test_a_full_disk_is_said_once_and_is_1(arguments: list[str]) -> None:
    command_line = [sys.executable, "-m", "appliance", *arguments]
    with open("/dev/full", "w") as full:
        result = subprocess.run(command_line, stdout=full, stderr=subprocess.PIPE, cwd=REPO, timeout=60, text=True)
    assert result.returncode == 1
    assert "No space left on device" in result.stderr
    assert "Traceback" not in result.stderr and "Exception ignored" not in result.stderr


@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-", "<&- >&-"])
def test_closed_streams_are_nobody_listening(closed: str) -> None:
    shell = f'"{sys.executable}" -m appliance --json version {closed}'
    result = subprocess.run(["sh", "-c", shell], capture_output=True, cwd=REPO, timeout=60, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


@pytest.mark.skipif(Path("/proc/driver/nvidia/gpus").exists(), reason="there may be a GPU")
def test_demo_without_a_gpu_is_refused_before_anything_is_fetched(tmp_path: Path) -> None:
    result = run_cli("demo", "--backend", "cuda", "--model", "no-such-model")
    assert result.returncode == 4 and "the NVIDIA driver shows none" in result.stderr


def on_terminal(*arguments: str, **environ: str) -> str:
    """What a user at a terminal sees (stdout and stderr together)."""
    master, slave = pty.openpty()
    environment = {key: value for key, value in os.environ.items() if key != "NO_COLOR"} | {"TERM": "xterm"} | environ
    with subprocess.Popen(
        [sys.executable, "-m", "appliance", *arguments], stdout=slave, stderr=slave, cwd=REPO, env=environment
    ) as child:
        os.close(slave)
        output = b""
        while True:
            try:
                block = os.read(master, 65536)
            except OSError:  # EIO: the child closed its side
                break
            if not block:
                break
            output += block
        child.wait(60)
    os.close(master)
    return output.decode()


def test_terminal_progress_and_colour(source: Path) -> None:
    shown = on_terminal("model", "add", str(source), "--name", "m")
    assert "copying" in shown and "100 %" in shown and "\r" in shown
    assert "\x1b[32mok\x1b[0m" in on_terminal("model", "verify", "m")
    assert "\x1b[3" not in on_terminal("model", "verify", "m", NO_COLOR="1")
    assert "copying" not in on_terminal("model", "add", str(source), "--name", "n", "--quiet")
    assert "\x1b[31merror:\x1b[0m" in on_terminal("model", "remove", "x")


def test_pipes_get_one_line_a_stage(source: Path) -> None:
    result = run_cli("model", "add", str(source), "--name", "m")
    assert result.stderr == "copying\n" and "\r" not in result.stderr
    assert result.stdout.startswith("m: added, ")


def test_format_bytes() -> None:
    sizes = (0, 999, 1000, 1536, 99_949, 99_951, 999_499, 999_500, 538_090_432, 15e9, 9e15)
    shown = [
        "0 B",
        "999 B",
        "1.0 kB",
        "1.5 kB",
        "99.9 kB",
        "100 kB",
        "999 kB",
        "1.0 MB",
        "538 MB",
        "15.0 GB",
        "9000 TB",
    ]
    assert [format_bytes(size) for size in sizes] == shown


def test_printable_disarms_escapes() -> None:
    assert printable("a\x1b[31m\n\u202eé") == "a\\x1b[31m\\n\\u202eé"


def test_serve_becomes_the_engine_with_the_same_options(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    became: list[list[str]] = []
    for name in ("execv", "execve", "execvp", "execvpe"):  # whichever it is: the test must not become the engine
        monkeypatch.setattr(os, name, lambda path, argv, *env: became.append(argv))
    main(["serve", "--model", str(source), "--host", "::1", "--port", "8123", "--", "--threads", "2"])
    options = parse_arguments(became[0][4:])
    assert became[0][:4] == [sys.executable, "-P", "-m", "engine"]
    assert (options.host, options.port, options.threads, options.backend) == ("::1", 8123, 2, "cpu")
    assert (options.model_dir, options.model_name) == (source, "Tiny")


@pytest.mark.parametrize(
    ("arguments", "says", "hint"),
    [
        (["--port", "99999"], "'99999' is no port", "`appliance serve --help`"),
        (["--port", "-1"], "'-1' is no port", "`appliance serve --help`"),
        (["--", "--bogus"], "options after --: unrecognized arguments: --bogus", "serve -- --help"),
        (["--", "--threads", "x"], "after --: argument --threads: 'x' is not a number", "serve -- --help"),
        (["--", "--port", "99999"], "after --: argument --port: '99999' is not a number", "serve -- --help"),
    ],
)  # fmt: skip
def test_serve_refuses_options_before_it_fetches_or_becomes_anything(
    arguments: list[str], says: str, hint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "execve", lambda *_: pytest.fail("it became the engine"))
    try:
        status = main(["serve", "--model", "smollm2", *arguments])
    except SystemExit as end:
        status = int(end.code or 0)
    err = capsys.readouterr().err
    assert status == 2 and says in err and hint in err and "usage:" not in err


def test_serve_leaves_the_help_of_the_engine_to_the_engine(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    became: list[list[str]] = []
    monkeypatch.setattr(os, "execve", lambda path, argv, env: became.append(argv))
    main(["serve", "--model", str(source), "--", "--help"])
    assert became[0][-1] == "--help"

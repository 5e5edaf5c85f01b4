"""The build does not depend on what happens to be in the environment, and never leaves a part out in silence."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HOSTILE = [
    "-ffast-math",
    "-Ofast",
    "-funsafe-math-optimizations",
    "-ffinite-math-only",
    "-fno-signed-zeros -fno-trapping-math -fassociative-math -freciprocal-math",
    "-ffp-contract=fast",
    "-O0",
]
IMMATERIAL = ("-ftrapping-math",)  # about exception flags, which nothing here reads; no value depends on it
SPY = """#!/bin/sh
printf '%s\\n' "$*" >> "$SPY_LOG"
for last; do [ "$previous" = -o ] && mkdir -p "$(dirname "$last")" && : > "$last"; previous=$last; done
exit 0
"""


def commands(directory: Path, flags: str) -> list[list[str]]:
    """Arguments of every compiler and linker call of a build with `flags` in CFLAGS and LDFLAGS; nothing is built."""
    directory.mkdir()
    spy, log = directory / "cc", directory / "log"
    spy.write_text(SPY)
    spy.chmod(0o755)
    environ = os.environ | {
        "CC": str(spy), "LDSHARED": f"{spy} -shared", "CFLAGS": flags, "LDFLAGS": flags, "SPY_LOG": str(log)
    }  # fmt: skip
    build = [sys.executable, "setup.py", "-q", "build_ext", "--force"]
    build += ["--build-lib", str(directory / "lib"), "--build-temp", str(directory / "temp")]
    done = subprocess.run(build, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return [shlex.split(line) for line in log.read_text().splitlines()]


def optimizer(arguments: list[str]) -> dict[str, str]:
    """What GCC makes of the options of a call: option -> [enabled], [disabled] or its value."""
    options = [word for word in arguments if word.startswith("-") and word[:2] not in ("-o", "-c", "-L", "-l")]
    report = subprocess.run(
        ["gcc", *options, "-Q", "--help=optimizers"], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    return dict(
        line.split(None, 1) for line in report.splitlines() if line.startswith("  -f") and len(line.split()) > 1
    )


def version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=60).stdout


needs_gcc = pytest.mark.skipif(
    shutil.which("gcc") is None or "clang" in version("gcc"), reason="asks GCC about its options"
)


@needs_gcc
def test_flags_of_the_environment_cannot_loosen_arithmetic(tmp_path: Path) -> None:
    """Distributions, conda and users set CFLAGS; 2,877 of 4,608 values of rmsnorm had other bits with -ffast-math."""
    plain = [optimizer(call) for call in commands(tmp_path / "plain", "")]
    assert len(plain) == 6  # three cores, compiled and linked
    assert plain[0]["-fassociative-math"] == "[disabled]" and plain[0]["-ffp-contract=[off|on|fast]"] == "off"
    for number, flags in enumerate(HOSTILE):
        for call, expected in zip(commands(tmp_path / str(number), flags), plain, strict=True):
            assert flags.split()[0] in call  # the environment is heard, and then overruled
            loosened = {
                name: value
                for name, value in optimizer(call).items()
                if value != expected[name] and name not in IMMATERIAL
            }
            assert not loosened, (flags, call)
            linked = subprocess.run(["gcc", "-###", *call], capture_output=True, text=True, timeout=60).stderr
            assert "crtfastmath" not in linked, (flags, call)


@pytest.mark.slow
@needs_gcc
@pytest.mark.skipif(os.environ.get("APPLIANCE_FULL") != "1", reason="a whole build; with APPLIANCE_FULL=1")
def test_a_build_with_fast_math_in_the_environment_is_exact(tmp_path: Path) -> None:
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    environ = os.environ | {"CFLAGS": "-Ofast -ffast-math", "LDFLAGS": "-Ofast -ffast-math", "APPLIANCE_FULL": ""}
    for command in (
        ["setup.py", "-q", "build_ext", "--inplace"],
        ["-c", "import kernels._cpu, numpy; assert numpy.float32(1e-40) * numpy.float32(1) != 0"],  # no flush to zero
        ["-m", "pytest", "-q", "tests/kernels/test_cpu_exactness.py"],
    ):
        done = subprocess.run(
            [sys.executable, *command], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=580
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert "kernels/_cpu" in "".join(str(path) for path in tmp_path.glob("kernels/_cpu.*.so"))


@pytest.mark.parametrize("source", ["engine/_ring.c", "engine/tokenizer/_bpe.c", "kernels/cpu/module.c"])
def test_a_missing_source_fails_the_build(tmp_path: Path, source: str) -> None:
    shutil.copy(ROOT / "setup.py", tmp_path)
    for name in ("engine/_ring.c", "engine/tokenizer/_bpe.c", "kernels/cpu/module.c"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / source).unlink()
    build = [sys.executable, "setup.py", "build_ext", "--inplace"]
    done = subprocess.run(build, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0 and f"{source} is missing" in done.stderr


def recipe(*arguments: str, **environ: str) -> list[str]:
    """The last command that make would run, as words."""
    environment = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS")} | environ
    shown = subprocess.run(
        ["make", "-n", "--no-print-directory", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True,
        check=True, timeout=60,
    )  # fmt: skip
    return shlex.split(shown.stdout.splitlines()[-1])


LEAKED = {"HOST": "build-7.example", "PORT": "1", "MODEL": "other", "BACKEND": "cuda"}


def test_make_takes_settings_from_the_command_line_only() -> None:
    """conda's compilers and csh export HOST."""
    defaults = ["serve", "--model", "smollm2", "--backend", "cpu", "--host", "127.0.0.1", "--port", "8000"]
    assert recipe("serve", **LEAKED)[2:] == defaults
    assert recipe("demo", **LEAKED)[1:] == ["demo", "--model", "smollm2", "--backend", "cpu"]
    given = [f"{name}={value}" for name, value in LEAKED.items()]
    wanted = ["serve", "--model", "other", "--backend", "cuda", "--host", "build-7.example", "--port", "1"]
    assert recipe("serve", *given)[2:] == wanted
    assert recipe("serve", "PORT=5", **LEAKED)[2:] == [*defaults[:-1], "5"]


def test_make_takes_python_from_the_environment() -> None:
    show = ["--eval=show: ; @echo $(PYTHON)", "show"]
    assert recipe(*show, PYTHON="/opt/python3.12") == ["echo", "/opt/python3.12"]
    assert recipe(*show, "PYTHON=python3.13", PYTHON="x") == ["echo", "python3.13"]

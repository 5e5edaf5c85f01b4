"""Only the compiled cores; everything else is in pyproject.toml.

Build in place for development: `python setup.py build_ext --inplace`. The flags never allow the compiler to reorder
floating point (no -ffast-math, no contraction): the CPU backend promises the same bits for the same request.
"""

from pathlib import Path

from setuptools import Extension, setup

# CFLAGS and LDFLAGS of the environment come before these, and of two flags the last wins. The linker needs them too:
# given -ffast-math, GCC before 13 links in code that makes the whole process flush denormal numbers to zero.
EXACT = [
    "-O3", "-fno-fast-math", "-fno-unsafe-math-optimizations", "-fno-associative-math", "-fno-reciprocal-math",
    "-fno-finite-math-only", "-fsigned-zeros", "-ffp-contract=off",
]  # fmt: skip
FLAGS = [
    *EXACT, "-std=gnu11", "-fno-math-errno", "-fvisibility=hidden", "-Wall", "-Wextra",
    "-Wno-unused-parameter", "-Wno-missing-field-initializers", "-Wno-cast-function-type", "-Wno-psabi",
]  # fmt: skip

EXTENSIONS = {
    "engine._ring": "engine/_ring.c",
    "engine.tokenizer._bpe": "engine/tokenizer/_bpe.c",
    "kernels._cpu": "kernels/cpu/module.c",
}

for source in EXTENSIONS.values():
    if not Path(source).is_file():  # never build without a core: the failure would come much later, as an ImportError
        raise SystemExit(f"setup.py: {source} is missing; this checkout is incomplete (see `git status`)")

setup(
    ext_modules=[
        Extension(
            name,
            [source],
            extra_compile_args=FLAGS,
            extra_link_args=EXACT,
            libraries=["m", "pthread"],
            depends=[str(path) for path in Path(source).parent.glob("*.[ch]")],
        )
        for name, source in EXTENSIONS.items()
    ]
)

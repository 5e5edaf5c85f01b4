"""Only the compiled cores; everything else is in pyproject.toml.

Build in place for development: `python setup.py build_ext --inplace`. The flags never allow the compiler to reorder
floating point (no -ffast-math, no contraction): the CPU backend promises the same bits for the same request.
"""

from pathlib import Path

from setuptools import Extension, setup

FLAGS = [
    "-O3", "-std=gnu11", "-fno-math-errno", "-ffp-contract=off", "-fvisibility=hidden", "-Wall", "-Wextra",
    "-Wno-unused-parameter", "-Wno-missing-field-initializers", "-Wno-cast-function-type", "-Wno-psabi",
]  # fmt: skip

EXTENSIONS = {
    "engine._ring": ["engine/_ring.c"],
    "engine.tokenizer._bpe": ["engine/tokenizer/_bpe.c"],
    "kernels._cpu": ["kernels/cpu/module.c"],
}

setup(
    ext_modules=[
        Extension(
            name,
            sources,
            extra_compile_args=FLAGS,
            libraries=["m", "pthread"],
            depends=[str(path) for path in Path(sources[0]).parent.glob("*.[ch]")],
        )
        for name, sources in EXTENSIONS.items()
        if Path(sources[0]).exists()
    ]
)

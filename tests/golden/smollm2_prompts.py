"""The prompts of the SmolLM2 golden values: chat, raw text, code, other languages, numbers, odd spacing.

Each entry is (name, text or chat messages). The first LOGIT_PROMPTS of them also get logits at every position.
"""

from __future__ import annotations

NEW_TOKENS = 48
LOGIT_PROMPTS = 6

Message = dict[str, str]

_LONG = (
    "A page of the key-value cache holds the keys and values of 128 consecutive tokens of one sequence. A block table "
    "maps the position of a token to its page, so that the pages of a sequence need not lie side by side, and two "
    "sequences that begin with the same tokens can share the pages of that beginning. When a sequence ends, its pages "
    "go back to the free list at once; when memory runs out, the youngest sequence is preempted and computed again "
    "later. Long prompts are cut into chunks, and each chunk is processed together with the decode steps of the other "
    "sequences, which bounds the time that any one of them must wait. None of this may change a single bit of the "
    "answer: the order in which numbers are added is fixed by the model alone, and never by what else happens to be "
    "in the batch. This is harder than it sounds, since most libraries choose a different algorithm for one row than "
    "for thirty-two, and floating point addition is not associative. The reward is that a wrong bit means a broken "
    "machine, a broken release, or a broken assumption, and that each of the three can be found by comparison alone. "
    "In the rest of this chapter we look at the scheduler, then at the cache, and at last at the kernels, one by one."
)

PROMPTS: list[tuple[str, str | list[Message]]] = [
    ("chat_capital", [{"role": "user", "content": "What is the capital of France?"}]),
    ("raw_once", "Once upon a time, in a small village by the sea,"),
    (
        "code_python",
        'def fibonacci(n: int) -> int:\n    """Return the n-th Fibonacci number.\n\n    >>> fibonacci(10)\n    55\n'
        '    """\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a\n\n\ndef factorial(n',
    ),
    ("german_french", "Die Hauptstadt von Österreich ist Wien. La capitale de l'Italie est Rome. Die Hauptstadt von"),
    ("long_pages", _LONG),
    (
        "chat_system_turns",
        [
            {"role": "system", "content": "You answer in one short sentence."},
            {"role": "user", "content": "Who wrote Hamlet?"},
            {"role": "assistant", "content": "William Shakespeare wrote Hamlet."},
            {"role": "user", "content": "And when was that?"},
        ],
    ),
    ("chat_list", [{"role": "user", "content": "Name three primary colors."}]),
    ("chat_haiku", [{"role": "user", "content": "Write a haiku about autumn rain."}]),
    ("chat_gravity", [{"role": "user", "content": "Explain gravity to a child in two sentences."}]),
    ("chat_math", [{"role": "user", "content": "What is 12 + 30? Answer with the number only."}]),
    ("chat_code", [{"role": "user", "content": "Write a C function that swaps two integers."}]),
    ("raw_list", "The planets of the solar system, in order from the sun:\n1."),
    ("raw_physics", "Water boils at a lower temperature on a mountain because"),
    ("code_c", '#include <stdio.h>\n\nint main(void)\n{\n\tfor (int i = 0; i < 10; i++)\n\t\tprintf("%d\\n",'),
    ("code_sql", "SELECT title, price\nFROM books\nWHERE price <"),
    ("code_json", '{"name": "Ada", "born": 1815, "languages": ["English", "French"], "works": ['),
    ("spanish", "El agua es importante para la vida porque"),
    ("cjk", "日本の首都は東京です。中国的首都是"),
    ("emoji", "Good morning! 🌞 Today I feel 😀 because"),
    ("one_word", "The"),
]

CHATS: list[list[Message]] = [
    [{"role": "user", "content": "hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}],
    [
        {"role": "system", "content": "Line one.\nLine two.\n"},
        {"role": "user", "content": "  leading and trailing spaces  "},
        {"role": "assistant", "content": "\n"},
        {"role": "user", "content": "ünïcödé 🌍 <|im_end|> inside"},
    ],
    [{"role": "system", "content": "Only a system message."}],
    [{"role": "assistant", "content": "An assistant speaks first."}],
    [{"role": "user", "content": ""}],
    [{"role": "user", "content": "2 + 2 = ?\n\n\t```py\nprint(2+2)\n```"}, {"role": "assistant", "content": "4"}],
]

TEXTS: list[str] = [
    "",
    " ",
    "Hello, world!",
    "It's 12:30, I'll pay $1,234.56 (don't ask).",
    "tabs\tand\r\nnewlines\n\n\nand   runs   of spaces   ",
    "x  12  y  3",
    "naïve café — “quotes” … ½ ² Ⅷ",
    "日本語と中文と한국어",
    "👩‍👩‍👧‍👦 🇦🇹 e\u0301",
    "<|im_start|>user\nhi<|im_end|>\n",
    "for(i=0;i<10;i++){a[i]+=0x1F;}",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
]

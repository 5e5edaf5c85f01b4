"""Chat templates: known prompts of public models, the Hugging Face dialect, and hostile templates."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from tokenizer_files import real_dir
from tokenizer_tiny import load, tiny

from engine.errors import TemplateError
from engine.tokenizer import Tokenizer

HI = [{"role": "user", "content": "hi"}]


def render(tmp_path: Path, template: Any, messages: list[dict[str, Any]] = HI, **kwargs: Any) -> str:
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": template}
    tokenizer = load(tmp_path, tiny(byte_level=False), tokenizer_config__json=json.dumps(config))
    return tokenizer.apply_chat_template(messages, **kwargs)


def test_chatml_of_smollm2() -> None:
    # The default system prompt of the model card of SmolLM2-135M-Instruct, and ChatML.
    tokenizer = Tokenizer.from_dir(real_dir("smollm2"))
    assert tokenizer.apply_chat_template([{"role": "user", "content": "What is the capital of France."}]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France.<|im_end|>\n<|im_start|>assistant\n"
    )
    chat = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}, {"role": "assistant", "content": "A"}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=False)
    assert (
        text == "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n"
    )
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids[:2] == [1, 9690]  # <|im_start|>, "system"
    assert ids.count(2) == 3


def test_llama3_prompt_and_no_double_bos() -> None:
    # Format of Meta's "Llama 3 model card and prompt formats".
    tokenizer = Tokenizer.from_dir(real_dir("llama3"))
    text = tokenizer.apply_chat_template(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " hi "}]
    )
    assert text == (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids[:3] == [128000, 128006, 9125]  # B-15: one <|begin_of_text|>
    assert ids.count(128000) == 1


def test_qwen25_with_tools() -> None:
    tokenizer = Tokenizer.from_dir(real_dir("qwen2_5"))
    assert tokenizer.apply_chat_template(HI) == (
        "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    tool = {"type": "function", "function": {"name": "f", "description": "<é & 'x'>"}}
    text = tokenizer.apply_chat_template(HI, tools=[tool])
    assert (
        '\n<tools>\n{"type": "function", "function": {"name": "f", "description": "<é & \'x\'>"}}\n</tools>\n' in text
    )


def test_dialect(tmp_path: Path) -> None:
    assert render(tmp_path, "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ nosuch }}") == "<s>|</s>||"
    assert (
        render(
            tmp_path, "{% for m in messages %}\n    {% if true %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}\nx"
        )
        == "hi\nx"
    )
    assert render(tmp_path, "{{ messages[0] | tojson }}") == '{"role": "user", "content": "hi"}'
    assert (
        render(tmp_path, "{{ {'b': '<ü>', 'a': 1} | tojson(indent=1, sort_keys=true) }}")
        == '{\n "a": 1,\n "b": "<ü>"\n}'
    )
    assert render(tmp_path, "{{ [1, 2] | tojson(separators=(',', ':')) }}") == "[1,2]"
    assert re.fullmatch(r"\d{4}-\d\d", render(tmp_path, "{{ strftime_now('%Y-%m') }}"))
    assert render(tmp_path, "{% for x in [1,2,3] %}{% if x == 2 %}{% break %}{% endif %}{{ x }}{% endfor %}") == "1"
    assert render(tmp_path, "a{% generation %}{{ messages[0].role }}{% endgeneration %}b") == "auserb"
    body = "{{ loop.index }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ x ~ 1 ~ none }} "
    loop = "{% for x in 'abc' %}" + body + "{% endfor %}"
    assert render(tmp_path, loop) == "1TrueFalse3a1None 2FalseFalse3b1None 3FalseTrue3c1None "
    namespace = (
        "{% set ns = namespace(n=0) %}{% for m in messages * 3 %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}"
    )
    assert render(tmp_path, namespace) == "3"
    assert render(tmp_path, "{{ add_generation_prompt }}{{ enable_thinking }}", enable_thinking=False) == "TrueFalse"
    assert render(tmp_path, "{{ tools is none }}{{ documents is none }}") == "TrueTrue"
    assert render(tmp_path, "{{ 'a%sb' % 3 }}{{ '{:>4}'.format(7) }}{{ 2 ** 10 }}{{ 'x' * 3 }}") == "a3b   71024xxx"
    macro = "{% macro f(n) %}{{ n }}{% if n %}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(3) }}"
    assert render(tmp_path, macro) == "3210"
    assert render(tmp_path, "{{ messages | map(attribute='role') | join(',') }}{{ '  x ' | trim }}") == "userx"


def test_template_places(tmp_path: Path) -> None:
    two = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T{{ tools | length }}"}]
    assert render(tmp_path, two) == "D"
    assert render(tmp_path, two, tools=[{"a": 1}]) == "T1"
    assert render(tmp_path, two, tools=[]) == "D"
    assert render(tmp_path, "D", tools=[{"a": 1}]) == "D"
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert render(tmp_path, two) == "from the file"


def test_messages_are_not_changed(tmp_path: Path) -> None:
    with pytest.raises(TemplateError):
        render(tmp_path, "{{ messages.append(1) }}")
    with pytest.raises(TemplateError):
        render(tmp_path, "{{ messages[0].update({'role': 'x'}) }}")


def test_a_missing_template_says_what_to_do(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, tiny())
    with pytest.raises(TemplateError) as error:
        tokenizer.apply_chat_template(HI)
    assert error.value.hint is not None


def test_raise_exception_and_errors_reach_the_caller(tmp_path: Path) -> None:
    with pytest.raises(TemplateError, match="roles must alternate"):
        render(tmp_path, "{{ raise_exception('roles must alternate') }}")
    for template in ("{{ messages[5].content }}", "{{ messages[0].content + 1 }}", "{{ nosuch.x.y }}", "{{ 1 / 0 }}",
                     "{{ messages | nosuch }}", "{% if %}", "{% include 'x' %}"):  # fmt: skip
        with pytest.raises(TemplateError):
            render(tmp_path, template)


HOSTILE = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "range": "{{ range(10**9) | list | length }}",
    "output": "{% for a in range(99999) %}{{ 'x' * 99999 }}{% endfor %}",
    "one string": "{{ 'x' * 10**10 }}",
    "one list": "{{ [0] * 10**10 }}",
    "plus": "{% set n = namespace(x='x') %}{% for a in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "tilde": "{% set n = namespace(x='x') %}{% for a in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "power": "{{ 9 ** 99999 }}",
    "product": "{% set n = namespace(x=9) %}{% for a in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "percent": "{{ '%9999999999d' % 1 }}",
    "percent star": "{{ '%*d' % (10**9, 1) }}",
    "format": "{{ '{:>9999999999}'.format(1) }}",
    "format filter": "{{ '%9999999999d' | format(1) }}",
    "center": "{{ 'x'.center(10**10) }}",
    "center filter": "{{ 'x' | center(10**10) }}",
    "indent filter": "{{ 'a\nb' | indent(10**10) }}",
    "replace": "{% set x = 'x' * 9**7 %}{{ x.replace('x', x) }}",
    "replace filter": "{% set x = 'x' * 9**7 %}{{ x | replace('x', x) }}",
    "join": "{% set x = 'x' * 9**7 %}{{ x.join([x] * 9**5) }}",
    "join filter": "{% set x = 'x' * 9**7 %}{{ ([1] * 9**5) | join(x) }}",
    "join of generator": "{% set x = 'x' * 9**7 %}{{ range(9999) | map('string') | join(x) }}",
    "many arguments": "{% set x = 'x' * 9**7 %}{{ ('{0}' * 9**5).format(x) }}",
    "many percents": "{% set x = 'x' * 9**7 %}{{ ('%s' * 9**4) % ((x,) * 9**4) }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "branching": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "attributes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ raise_exception.__globals__['json'] }}",
    "deep": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "imports": "{% import 'os' as os %}{{ os }}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_template_is_stopped(tmp_path: Path, name: str) -> None:
    start = time.monotonic()
    with pytest.raises(TemplateError):
        render(tmp_path, HOSTILE[name])
    assert time.monotonic() - start < 60  # not a speed test: without the limits most of these never end

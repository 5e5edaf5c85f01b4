"""Chat templates: Hugging Face's jinja dialect in jinja2's immutable sandbox, with bounded work and output.

The dialect (transformers, utils/chat_template_utils.py): trim_blocks, lstrip_blocks, loop controls, {% generation %},
the globals raise_exception and strftime_now, and a tojson that does not escape HTML. A template is part of a model and
may be hostile: loop rounds, calls, time and the length of every string it builds are bounded (`Budget`).
"""

from __future__ import annotations

import functools
import json
import re
import time
from datetime import datetime
from typing import TYPE_CHECKING, Any

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes

from engine.errors import TemplateError, TokenizerError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from jinja2.parser import Parser
    from jinja2.runtime import Context

MAX_TEMPLATE_CHARS = 1 << 20
MAX_OUTPUT_CHARS = 64 << 20
MAX_WORK = 500_000  # loop rounds + calls of one render
MAX_SECONDS = 10.0
MAX_WIDTH = 100_000  # integers given to filters and methods that pad, and widths in format strings
TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
BUDGET = "_render_budget"
WIDE_FORMAT = re.compile(r"\d{6}|\*")


def named_tokens(config: dict[str, Any]) -> dict[str, str]:
    """bos_token and the like of tokenizer_config.json, each a string or an object with "content"."""
    named: dict[str, str] = {}
    for name in TOKEN_NAMES:
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            named[name] = value
        elif value is not None:
            raise TokenizerError(f"tokenizer_config.json: {name} must be a string, not {type(value).__name__}")
    return named


class TemplateLimit(Exception):
    """The template asked for more work or output than a prompt can need."""


class Budget:
    def __init__(self) -> None:
        self.left = MAX_WORK
        self.deadline = time.monotonic() + MAX_SECONDS

    def spend(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise TemplateLimit(f"more than {MAX_WORK} loop rounds and calls")
        if self.left % 64 == 0 and time.monotonic() > self.deadline:
            raise TemplateLimit(f"longer than {MAX_SECONDS:g} s")


def bounded(value: Any) -> Any:
    if isinstance(value, str | list | tuple | bytes) and len(value) > MAX_OUTPUT_CHARS:
        raise TemplateLimit(f"a value longer than {MAX_OUTPUT_CHARS} characters")
    return value


def check_arguments(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuses what makes a short call build a huge string: '%9999999d' % 1, s.center(10**9), ..."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, int) and abs(value) > MAX_WIDTH:
            raise TemplateLimit(f"the width {value} in a call that builds text")
    if isinstance(target, str) and WIDE_FORMAT.search(target):
        raise TemplateLimit("a width of six digits or more in a format string")


def longest(values: Iterable[Any]) -> int:
    return max((len(value) for value in values if isinstance(value, str)), default=0)


def check_growth(name: str, owner: str, args: tuple[Any, ...]) -> None:
    """Refuses str methods whose result would be huge, before they allocate it."""
    size = 0
    if name in ("format", "format_map", "%"):
        size = max(owner.count("{"), owner.count("%")) * longest(args)
    elif name == "replace" and len(args) > 1 and isinstance(args[0], str) and isinstance(args[1], str):
        size = (len(owner) // max(1, len(args[0])) + 1) * len(args[1])
    elif name == "join" and args:
        parts = args[0] if isinstance(args[0], list | tuple | str | dict) else None
        size = MAX_WIDTH * len(owner) if parts is None else len(parts) * (len(owner) + longest(parts))
    if size > MAX_OUTPUT_CHARS:
        raise TemplateLimit(f"a value longer than {MAX_OUTPUT_CHARS} characters")


@jinja2.pass_context
def counted(context: Context, values: Iterable[Any]) -> Iterator[Any]:
    budget = context[BUDGET]
    for value in values:
        budget.spend()
        yield value


class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            check_arguments(left, (), {})
            check_growth("%", left, right if isinstance(right, tuple) else (right,))
        if operator == "**" and not (abs(left) < 1 << 32 and abs(right) < 64):
            raise TemplateLimit("a power too large")
        if operator == "*":
            for text, count in ((left, right), (right, left)):
                if isinstance(text, str | list | tuple) and isinstance(count, int):
                    if len(text) * count > MAX_OUTPUT_CHARS:
                        raise TemplateLimit(f"a value longer than {MAX_OUTPUT_CHARS} characters")
                elif isinstance(text, int) and text.bit_length() > 1 << 12:
                    raise TemplateLimit("a number too large")
        return bounded(super().call_binop(context, operator, left, right))

    def call(self, context: Context, target: Any, /, *args: Any, **kwargs: Any) -> Any:
        context[BUDGET].spend()
        method = getattr(target, "__wrapped__", target)  # jinja2 wraps str.format
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str):
            check_arguments(owner if method.__name__ in ("format", "format_map") else None, args, kwargs)
            check_growth(method.__name__, owner, (*args, *kwargs.values()))
        return bounded(super().call(context, target, *args, **kwargs))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, "_counted", [], [], None, None, lineno=loop.lineno)
        for concat in list(tree.find_all(nodes.Concat)):
            parts = [nodes.Filter(part, "string", [], [], None, None, lineno=concat.lineno) for part in concat.nodes]
            joined: nodes.Expr = parts[0]
            for part in parts[1:]:
                joined = nodes.Add(joined, part, lineno=concat.lineno)
            concat.nodes = [joined]  # so that "~" is bounded like "+"
        tree.set_environment(self)
        return tree


class GenerationTag(jinja2.ext.Extension):
    """{% generation %} marks what an assistant wrote, for training; when prompting it is only its content."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it that way)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None,
           separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:  # fmt: skip
    check_arguments(None, (indent,), {})
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def narrow(name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = jinja2.filters.FILTERS[name]

    @functools.wraps(function)  # keeps the mark of filters that want the context first
    def checked(*args: Any, **kwargs: Any) -> Any:
        values = [a for a in (*args, *kwargs.values()) if not isinstance(a, nodes.EvalContext)]
        text = values[0] if values and isinstance(values[0], str) else ""
        check_arguments(text if name == "format" else None, args, kwargs)
        if name == "join":
            text, values = (values[1] if len(values) > 1 and isinstance(values[1], str) else ""), ["", *values]
        check_growth(name, text, tuple(values[1:]))
        return bounded(function(*args, **kwargs))

    return checked


def make_environment() -> Sandbox:
    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, GenerationTag])
    environment.filters["tojson"] = tojson
    environment.filters["_counted"] = counted
    for name in ("center", "format", "indent", "wordwrap", "replace", "join", "filesizeformat"):
        environment.filters[name] = narrow(name)
    environment.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
    return environment


class ChatTemplates:
    """The templates of one model. They compile when first used, so that a model with a broken one still completes."""

    def __init__(self, from_config: Any, from_file: str | None, tokens: dict[str, str]) -> None:
        self.sources: dict[str, str] = {}
        self._tokens = tokens
        self._compiled: dict[str, jinja2.Template] = {}
        entries = [] if from_config is None else from_config
        if isinstance(entries, str):
            entries = [{"name": "default", "template": entries}]
        for entry in entries if isinstance(entries, list) else [None]:
            match entry:
                case {"name": str(name), "template": str(source)}:
                    self.sources[name] = source
                case _:
                    raise TokenizerError("tokenizer_config.json: chat_template is neither text nor a list of templates")
        if from_file is not None:
            self.sources["default"] = from_file  # the newer place wins, as in transformers

    def render(self, messages: list[dict[str, Any]], *, tools: list[dict[str, Any]] | None = None,
               add_generation_prompt: bool = True, **kwargs: Any) -> str:  # fmt: skip
        name = "tool_use" if tools and "tool_use" in self.sources else "default"
        template = self._compile(name)
        variables = {**self._tokens, "documents": None, **kwargs, "messages": messages, "tools": tools}
        variables |= {"add_generation_prompt": add_generation_prompt, BUDGET: Budget()}
        parts: list[str] = []
        size = 0
        try:
            for part in template.generate(variables):
                size += len(part)
                parts.append(part)
                if size > MAX_OUTPUT_CHARS:
                    raise TemplateLimit(f"more than {MAX_OUTPUT_CHARS} characters of output")
        except (TemplateLimit, MemoryError, RecursionError) as e:
            raise TemplateError(f"the chat template was stopped: {e or type(e).__name__}") from e
        except Exception as e:  # any error of code inside the template or of the values it was given
            raise TemplateError(f"the chat template failed: {e or type(e).__name__}") from e
        return "".join(parts)

    def _compile(self, name: str) -> jinja2.Template:
        if name in self._compiled:
            return self._compiled[name]
        source = self.sources.get(name)
        if source is None:
            raise TemplateError(
                "this model has no chat template",
                hint="use /v1/completions, or put a chat_template.jinja beside its tokenizer.json",
            )
        if len(source) > MAX_TEMPLATE_CHARS:
            raise TemplateError(f"the chat template is longer than {MAX_TEMPLATE_CHARS} characters")
        try:
            self._compiled[name] = make_environment().from_string(source)
        except (jinja2.TemplateError, RecursionError, MemoryError, SyntaxError) as e:
            raise TemplateError(f"the chat template does not compile: {e}") from e
        return self._compiled[name]

"""Chat templates: the Jinja dialect that transformers 5.17 renders, in a sandbox and within bounds.

A template comes with a checkpoint, from anyone. It runs in Jinja's immutable sandbox (no attribute that starts with an
underscore, no change to what it is given), and it is bounded: in its own size, in what it writes, in the time its loops
and macros take, and in the two operators that make a small expression enormous.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from monograph.errors import PromptError

if TYPE_CHECKING:
    from jinja2 import Template

MAX_TEMPLATE_NBYTES = 1 << 20
MAX_PROMPT_CHARS = 1 << 24  # longer than any context: a template that writes this much is broken
MAX_SECONDS = 10.0  # rendering takes milliseconds

_TICK = "monograph_tick"  # called by every iteration and every macro; stops a render that runs too long
_END_OF_FINAL = "END_OF_FINAL_MESSAGE"


def choose(templates: str | Mapping[str, str] | None, wanted: str | None = None, *, with_tools: bool = False) -> str:
    """Pick the template to render.

    Args:
        templates: What the model has: one template, several by name, or none.
        wanted: A name among them, or a template to use in their place.
        with_tools: Whether the conversation has tools: a template named "tool_use" then comes before "default".

    Raises:
        PromptError: There is no such template, or none at all.
    """
    named = templates if isinstance(templates, Mapping) else {}
    if wanted is not None:
        if wanted in named:
            return named[wanted]
        if "{" not in wanted:
            raise PromptError(f"chat_template: no template is named {wanted!r}; the model has {_listed(templates)}")
        return wanted
    if isinstance(templates, str):
        return templates
    if templates is None:
        raise PromptError(
            "the model has no chat template: it is a base model, which continues plain text; prompt it with a string, "
            "or pass a template as chat_template"
        )
    for name in ("tool_use", "default") if with_tools else ("default",):
        if name in named:
            return named[name]
    raise PromptError(f"chat_template: none is named 'default'; pass one of {_listed(templates)}")


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool | str = False,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Render a conversation.

    Args:
        template: The Jinja template.
        messages: Mappings with a role and a content, oldest first.
        tools: JSON schemas of functions that the model may call.
        documents: Mappings that the template may quote.
        add_generation_prompt: Whether the text ends where the answer begins; None means unless the last message is
            continued.
        continue_final_message: Whether the text ends inside the last message; a string names the field.
        variables: What else the template sees; special tokens above all.

    Raises:
        PromptError: A message is malformed, or the template refuses, breaks a bound or fails.
    """
    chat = checked_messages(messages)
    schemas = _checked_mappings("tools", tools, "JSON schemas of functions")
    quoted = _checked_mappings("documents", documents, "mappings with a title and a text")
    if add_generation_prompt is None:
        add_generation_prompt = not continue_final_message
    final = ""
    if continue_final_message:
        if add_generation_prompt:
            raise PromptError("continue_final_message and add_generation_prompt: the prompt can end in one place only")
        final = _mark_final(chat, template, "content" if continue_final_message is True else continue_final_message)
    text = _run(
        _compiled(template),
        {
            "messages": chat,
            "tools": schemas,
            "documents": quoted,
            "add_generation_prompt": add_generation_prompt,
            **(variables or {}),
        },
    )
    return _cut_after_final(text, final) if continue_final_message else text


def checked_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Check a conversation and copy it, one level deep.

    A content is a string or a list of text parts. Only a message with tool calls may do without.

    Raises:
        PromptError: Names the message and the field.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise PromptError(f"messages: expected a list of messages, got {_type(messages)}")
    if not messages:
        raise PromptError("messages: expected at least one message, got none")
    chat: list[dict[str, Any]] = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise PromptError(f"messages[{i}]: expected a mapping with role and content, got {_type(message)}")
        if "role" not in message:
            raise PromptError(f"messages[{i}].role: missing")
        if not isinstance(message["role"], str) or not message["role"]:
            raise PromptError(f"messages[{i}].role: expected a name such as 'user', got {message['role']!r}")
        if message.get("content") is not None:
            _check_content(message["content"], f"messages[{i}].content")
        elif not message.get("tool_calls"):
            what = "expected a string, got None" if "content" in message else "missing"
            raise PromptError(f"messages[{i}].content: {what}")
        chat.append(dict(message))
    return chat


def _check_content(content: Any, where: str) -> None:
    if isinstance(content, str):
        return
    if isinstance(content, Mapping) or not isinstance(content, Sequence):
        raise PromptError(f"{where}: expected a string or a list of text parts, got {_type(content)}")
    for j, part in enumerate(content):
        if not isinstance(part, Mapping):
            raise PromptError(f"{where}[{j}]: expected a mapping with type and text, got {_type(part)}")
        if part.get("type") != "text":
            raise PromptError(f"{where}[{j}].type: expected 'text', the only kind of part, got {part.get('type')!r}")
        if not isinstance(part.get("text"), str):
            raise PromptError(f"{where}[{j}].text: expected a string, got {_type(part.get('text'))}")


def _checked_mappings(
    argument: str, values: Sequence[Mapping[str, Any]] | None, what: str
) -> list[dict[str, Any]] | None:
    if values is None:
        return None
    if isinstance(values, str | Mapping) or not isinstance(values, Sequence):
        raise PromptError(f"{argument}: expected a list of {what}, got {_type(values)}")
    for i, value in enumerate(values):
        if not isinstance(value, Mapping):
            raise PromptError(f"{argument}[{i}]: expected {what}, got {_type(value)}")
    return [dict(value) for value in values]


def _mark_final(chat: list[dict[str, Any]], template: str, field: str) -> str:
    """Put a mark at the end of the last message, in place. Returns what it said."""
    where = f"messages[{len(chat) - 1}].{field}"
    final = chat[-1].get(field)
    if final is None:
        raise PromptError(f"{where}: missing, so continue_final_message has nothing to continue")
    if field not in template:
        raise PromptError(f"continue_final_message: the chat template does not use the field {field!r}")
    # The blank after the mark tells whether the template trims the message: it is gone then.
    if isinstance(final, str):
        chat[-1][field] = f"{final}{_END_OF_FINAL} "
        return final
    if not isinstance(final, Sequence) or not all(isinstance(part, Mapping) for part in final):
        raise PromptError(f"{where}: expected a string or a list of text parts, got {_type(final)}")
    parts = [dict(part) for part in final]
    for part in reversed(parts):
        if isinstance(part.get("text"), str):
            text = str(part["text"])
            part["text"] = f"{text}{_END_OF_FINAL} "
            chat[-1][field] = parts
            return text
    raise PromptError(f"{where}: no text part, so continue_final_message has nothing to continue")


def _cut_after_final(text: str, final: str) -> str:
    end = text.rfind(_END_OF_FINAL)
    if end < 0 or final.strip() not in text:
        raise PromptError("continue_final_message: the chat template leaves out or changes the last message")
    trimmed = text[end + len(_END_OF_FINAL) : end + len(_END_OF_FINAL) + 1] != " "
    return text[:end].rstrip() if trimmed else text[:end]


def _run(template: Template, variables: dict[str, Any]) -> str:
    from jinja2.exceptions import SecurityError

    deadline = time.monotonic() + MAX_SECONDS

    def tick() -> str:
        if time.monotonic() > deadline:
            raise _BoundError(f"it ran for more than {MAX_SECONDS:g} s")
        return ""

    pieces: list[str] = []
    nchars = 0
    try:
        for piece in template.generate({**variables, _TICK: tick}):
            pieces.append(piece)
            nchars += len(piece)
            if nchars > MAX_PROMPT_CHARS:
                raise _BoundError(f"it wrote more than {MAX_PROMPT_CHARS:,} characters")
    except _RefusedError as refusal:
        raise PromptError(f"the chat template refuses this conversation: {refusal}") from refusal
    except (SecurityError, _BoundError) as error:
        raise PromptError(f"the chat template does what a template may not: {error}") from error
    except Exception as error:  # whatever the template's own code runs into
        raise PromptError(f"the chat template failed on this conversation: {type(error).__name__}: {error}") from error
    return "".join(pieces)


@lru_cache(maxsize=16)
def _compiled(text: str) -> Template:
    from jinja2 import nodes
    from jinja2.exceptions import TemplateSyntaxError

    nbytes = len(text.encode("utf-8", "surrogatepass"))
    if nbytes > MAX_TEMPLATE_NBYTES:
        raise PromptError(f"the chat template has {nbytes:,} bytes; the limit is {MAX_TEMPLATE_NBYTES:,}")
    environment = _environment_class()(trim_blocks=True, lstrip_blocks=True, extensions=_extensions())
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        tree = environment.parse(text)
        for node in tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
            tick = nodes.Call(nodes.Name(_TICK, "load"), [], [], None, None)
            node.body.insert(0, nodes.ExprStmt(tick).set_lineno(node.lineno))
        template: Template = environment.from_string(tree)
    except TemplateSyntaxError as error:
        raise PromptError(f"the chat template is not valid Jinja: line {error.lineno}: {error.message}") from error
    except Exception as error:  # constant expressions are evaluated here already; nesting can be too deep
        raise PromptError(f"the chat template cannot be compiled: {type(error).__name__}: {error}") from error
    return template


class _RefusedError(Exception):
    """The template called ``raise_exception``."""


class _BoundError(Exception):
    """The template would run too long or grow too large."""


def _raise_exception(message: object = "") -> str:
    raise _RefusedError(str(message))


def _strftime_now(format: str) -> str:  # noqa: A002 - templates may name the argument
    return datetime.now().strftime(format)


def _tojson(
    x: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is written in prompts. Jinja's own filter escapes for HTML."""
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@lru_cache(maxsize=1)
def _environment_class() -> Callable[..., Any]:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class BoundedEnvironment(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset({"*", "**"})

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if operator == "**" and isinstance(left, int) and isinstance(right, int):
                if left.bit_length() * right > 4096:
                    raise _BoundError(f"{left} ** {right} is too large a number")
            elif operator == "*":
                for many, times in ((left, right), (right, left)):
                    if not isinstance(many, str | bytes | list | tuple) or not isinstance(times, int):
                        continue
                    if len(many) * times > MAX_PROMPT_CHARS:
                        raise _BoundError(f"it repeats a value {times:,} times")
            return super().call_binop(context, operator, left, right)

    return BoundedEnvironment


@lru_cache(maxsize=1)
def _extensions() -> list[Any]:
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser

    class GenerationTag(Extension):
        """``{% generation %}`` marks what the assistant wrote, for training; a prompt takes its body as it stands."""

        tags = {"generation"}  # noqa: RUF012 - Jinja declares it so

        def parse(self, parser: Parser) -> nodes.Node:
            lineno = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(lineno)

    return [GenerationTag, loopcontrols]


def _listed(templates: str | Mapping[str, str] | None) -> str:
    if isinstance(templates, Mapping):
        return ", ".join(map(repr, sorted(templates)))
    return "no template" if templates is None else "one template, without a name"


def _type(value: object) -> str:
    return type(value).__name__

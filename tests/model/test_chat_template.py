"""Chat templates: what is refused, and how it is said. What is accepted is compared with transformers elsewhere."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from monograph.errors import PromptError
from monograph.model import chat_template
from monograph.model.chat_template import checked_messages, choose, render
from monograph.model.tokenizer import Tokenizer
from tests.model.tiny_tokenizers import byte_level

HELLO = [{"role": "user", "content": "hello"}]
CHATML = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hi", "messages: expected a list of messages, got str"),
        ({"role": "user", "content": "hi"}, "messages: expected a list of messages, got dict"),
        (None, "messages: expected a list of messages, got NoneType"),
        ([], "messages: expected at least one message, got none"),
        (["hi"], r"messages\[0\]: expected a mapping with role and content, got str"),
        ([*HELLO, {"content": "hi"}], r"messages\[1\]\.role: missing"),
        ([{"role": None, "content": "hi"}], r"messages\[0\]\.role: expected a name such as 'user', got None"),
        ([{"role": "", "content": "hi"}], r"messages\[0\]\.role: expected a name"),
        ([*HELLO, {"role": "user"}], r"messages\[1\]\.content: missing"),
        ([{"role": "user", "content": None}], r"messages\[0\]\.content: expected a string, got None"),
        (
            [{"role": "user", "content": 3}],
            r"messages\[0\]\.content: expected a string or a list of text parts, got int",
        ),
        ([{"role": "user", "content": {"type": "text"}}], r"messages\[0\]\.content: expected a string or a list"),
        ([{"role": "user", "content": ["x"]}], r"messages\[0\]\.content\[0\]: expected a mapping with type and text"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image"}]}],
            r"messages\[0\]\.content\[1\]\.type: expected 'text', the only kind of part, got 'image'",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], r"messages\[0\]\.content\[0\]\.text: expected a string"),
    ],
)
def test_a_malformed_message_is_named_with_its_field(messages: Any, message: str) -> None:
    with pytest.raises(PromptError, match=message):
        render(CHATML, messages)


def test_well_formed_messages_are_copied_as_they_are() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": ""},
        {"role": "user", "content": [{"type": "text", "text": "x"}], "name": "kim"},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]},
        {"role": "tool", "content": "22"},
    ]
    checked = checked_messages(tuple(messages))
    assert checked == messages
    checked[0]["content"] = "changed"
    assert messages[0]["content"] == ""


def test_tools_and_documents_are_checked() -> None:
    with pytest.raises(PromptError, match=r"tools\[0\]: expected JSON schemas of functions, got builtin_function"):
        render(CHATML, HELLO, tools=[print])  # type: ignore[list-item]
    with pytest.raises(PromptError, match="tools: expected a list of JSON schemas of functions, got dict"):
        render(CHATML, HELLO, tools={"type": "function"})  # type: ignore[arg-type]
    with pytest.raises(PromptError, match=r"documents\[1\]: expected mappings with a title and a text, got str"):
        render(CHATML, HELLO, documents=[{"title": "a"}, "b"])  # type: ignore[list-item]


def test_a_template_is_chosen_by_name() -> None:
    both = {"default": "{{ 1 }}", "tool_use": "{{ 2 }}"}
    assert choose("{{ 0 }}") == "{{ 0 }}"
    assert choose("{{ 0 }}", with_tools=True) == "{{ 0 }}"
    assert choose(both) == "{{ 1 }}"
    assert choose(both, with_tools=True) == "{{ 2 }}"
    assert choose(both, "default", with_tools=True) == "{{ 1 }}"
    assert choose({"default": "{{ 1 }}"}, with_tools=True) == "{{ 1 }}"
    assert choose(both, "{{ 3 }}") == choose(None, "{{ 3 }}") == "{{ 3 }}"
    with pytest.raises(PromptError, match="no template is named 'rag'; the model has 'default', 'tool_use'"):
        choose(both, "rag")
    with pytest.raises(PromptError, match="no template is named 'rag'; the model has one template, without a name"):
        choose("{{ 0 }}", "rag")
    with pytest.raises(PromptError, match="none is named 'default'; pass one of 'rag', 'tool_use'"):
        choose({"tool_use": "{{ 2 }}", "rag": "{{ 3 }}"})


def test_b27_a_base_model_says_that_it_has_no_template() -> None:
    tokenizer = Tokenizer.from_parts(byte_level())
    with pytest.raises(PromptError, match="no chat template: it is a base model, which continues plain text"):
        tokenizer.apply_chat_template(HELLO)
    assert tokenizer.encode("hello") == list(b"hello")
    assert tokenizer.apply_chat_template(HELLO, chat_template=CHATML, tokenize=False) == (
        "<|user|>hello<|end|>\n<|assistant|>"
    )


def test_b27_a_templates_own_refusal_is_passed_on() -> None:
    template = "{% if messages[0].role != 'user' %}{{ raise_exception('Roles must alternate!') }}{% endif %}ok"
    assert render(template, HELLO) == "ok"
    with pytest.raises(PromptError, match=r"^the chat template refuses this conversation: Roles must alternate!$"):
        render(template, [{"role": "system", "content": "x"}])


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__name__ }}",
        "{{ raise_exception.__globals__.os }}",
        "{{ strftime_now.__globals__['datetime'] }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ messages[0].clear() }}",
        "{{ '{0.__class__.__name__}'.format(messages) }}",
    ],
)
def test_b27_a_template_cannot_leave_its_sandbox(template: str) -> None:
    messages = [dict(HELLO[0])]
    with pytest.raises(PromptError, match="the chat template does what a template may not"):
        render(template, messages)
    assert messages == HELLO


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for %}", "not valid Jinja: line 1"),
        ("\n\n{% endif %}", "not valid Jinja: line 3"),
        ("{{ x | no_such_filter }}", "not valid Jinja"),
        ("{{ nothing.at_all }}", "failed on this conversation: UndefinedError"),
        ("{{ messages[0].content + 1 }}", "failed on this conversation: TypeError"),
        ("{{ 1 / (messages | length - 1) }}", "failed on this conversation: ZeroDivisionError"),
        ("{% include 'x' %}", "failed on this conversation: TypeError: no loader"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "failed on this conversation: RecursionError"),
        ("{% for i in range(10**6) %}{% endfor %}", "failed on this conversation: OverflowError"),
        ("{{" + "(" * 1000 + "1" + ")" * 1000 + "}}", "cannot be compiled: RecursionError"),
    ],
)
def test_a_template_that_fails_says_where_the_fault_is(template: str, message: str) -> None:
    with pytest.raises(PromptError, match=message):
        render(template, HELLO)


def test_a_template_is_bounded_in_size() -> None:
    with pytest.raises(PromptError, match="the chat template has 1,048,580 bytes; the limit is 1,048,576"):
        render("é" * 524_290, HELLO)
    assert render("é" * 524_288, HELLO) == "é" * 524_288


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% set r = range(99999) %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for a in [1] recursive %}{{ loop([1, 1]) if loop.depth < 60 }}{% endfor %}",
    ],
)
def test_a_template_is_bounded_in_time(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_SECONDS", 0.1)
    start = time.monotonic()
    with pytest.raises(PromptError, match=r"may not: it ran for more than 0\.1 s"):
        render(template, HELLO)
    assert time.monotonic() - start < 5


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}", "wrote more than 16,777,216 characters"),
        ("{{ 'x' * 10**10 }}", "repeats a value 10,000,000,000 times"),
        ("{% set n = 10**10 %}{{ (n * [1]) | length }}", "repeats a value 10,000,000,000 times"),
        ("{{ 9 ** (9 ** 9) }}", r"9 \*\* 387420489 is too large"),
    ],
)
def test_a_template_is_bounded_in_what_it_makes(template: str, message: str) -> None:
    with pytest.raises(PromptError, match=message):
        render(template, HELLO)


def test_ordinary_arithmetic_is_not_in_the_way() -> None:
    assert render("{{ '-' * 40 }}{{ 2 ** 10 }}{{ 3 * [1] }}{{ 1.5 * 2 }}{{ 2.0 ** 3 }}", HELLO) == (
        "-" * 40 + "1024[1, 1, 1]3.08.0"
    )


def test_the_final_message_can_be_continued() -> None:
    messages = [*HELLO, {"role": "assistant", "content": "Well, "}]
    assert render(CHATML, messages, continue_final_message=True) == "<|user|>hello<|end|>\n<|assistant|>Well, "
    assert messages[1]["content"] == "Well, "


@pytest.mark.parametrize(
    ("messages", "options", "message"),
    [
        (HELLO, {"add_generation_prompt": True}, "the prompt can end in one place only"),
        ([{"role": "assistant", "tool_calls": [1]}], {}, r"messages\[0\]\.content: missing"),
        (HELLO, {"continue_final_message": "thoughts"}, r"messages\[0\]\.thoughts: missing"),
        ([HELLO[0] | {"thoughts": "x"}], {"continue_final_message": "thoughts"}, "does not use the field 'thoughts'"),
        ([{"role": "user", "content": []}], {}, r"messages\[0\]\.content: no text part"),
        ([HELLO[0] | {"role": 5 * "x"}, {"role": "user", "content": "x"}], {"tools": []}, None),
    ],
)
def test_a_final_message_that_cannot_be_continued(
    messages: list[dict[str, Any]], options: dict[str, Any], message: str | None
) -> None:
    options = {"continue_final_message": True} | options
    if message is None:
        assert render(CHATML, messages, **options).endswith("x")
        return
    with pytest.raises(PromptError, match=message):
        render(CHATML, messages, **options)


def test_a_template_that_drops_the_final_message_cannot_continue_it() -> None:
    with pytest.raises(PromptError, match="leaves out or changes the last message"):
        render("{{ messages[0].content[:2] }}", HELLO, continue_final_message=True)


def test_one_template_renders_in_many_threads() -> None:
    results: dict[int, str] = {}

    def work(i: int) -> None:
        results[i] = render(CHATML, [{"role": "user", "content": f"{i} " * 100}])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {i: f"<|user|>{f'{i} ' * 100}<|end|>\n<|assistant|>" for i in range(8)}

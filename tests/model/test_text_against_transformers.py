"""Ids, chat prompts and decoded text are those of transformers, for the same tokenizer files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jinja2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from monograph.model.text_stream import TextStream
from monograph.model.tokenizer import Tokenizer
from tests.model.tiny_tokenizers import PLAIN_ADDED, SPECIAL, byte_level, save, sentencepiece

NAMES = {"bos_token": "<s>", "eos_token": "</s>"}
TEXTS = ["", "a", " a  b ", "the cat\n\n the\tmat", "naïve 漢字 🙂 e\u0301", "<s>", "a<s>b</s> c<|user|>  d", "<tool>x"]

CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": " You are terse. "},
    {"role": "user", "content": "Wie heißt <b>das</b> 漢字? \"q\" & 'r'"},
    {"role": "assistant", "content": "é🙂\n"},
    {"role": "user", "content": "und\n\n  nun?  "},
]
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "wetter",
            "description": "Größe & <Ort>",
            "parameters": {"type": "object", "properties": {"z": {"type": "string"}, "a": {"enum": [1, None, True]}}},
        },
    }
]
DOCUMENTS = [{"title": "Eins", "text": "Ein Käse."}, {"title": "Zwei", "text": "x\ny"}]

TEMPLATES = {
    "bos and roles": (
        "{{ bos_token }}{% for message in messages %}<|user|>{{ message.role }}\n{{ message['content'] | trim }}<|end|>"
        "\n{% endfor %}{% if add_generation_prompt %}<|user|>assistant\n{% endif %}"
    ),
    "no bos": "{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}{% endfor %}",
    "blocks and blanks": (
        "{%- for m in messages %}\n    {%- if loop.first %}\n  {{ 'first' }}\n    {% elif loop.last -%}\n   last\n"
        "{% endif %}\n   {# nothing #}\n  {{ m.role }}\n\t{% if true %} yes {% endif %}\n{% endfor %}\nend\n"
    ),
    "loop controls": (
        "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{{ loop.index }}{{ m.content }}"
        "{% if loop.index > 2 %}{% break %}{% endif %}{% else %}none{% endfor %}"
    ),
    "generation": (
        "{% set x = 1 %}{% for m in messages %}{% if m.role == 'assistant' %}\n  {% generation %}\n  {{ m.content }}"
        "{{ x }}{% set x = 2 %}{{ x }}\n  {% endgeneration %}{{ x }}\n{% else %}{{ m.content }}{{ x }}{% endif %}"
        "{% endfor %}{{ x }}"
    ),
    "json": (
        "{{ messages[1] | tojson }}{{ messages | tojson(indent=2) }}{{ tools | tojson(separators=(',', ':')) }}"
        "{{ messages[1] | tojson(ensure_ascii=True, sort_keys=True) }}{{ documents | tojson(False, 4) }}"
    ),
    "tools and documents": (
        "{% if tools is not none %}{% for tool in tools %}{{ tool.function.name }}: {{ tool['function'] | tojson }}\n"
        "{% endfor %}{% endif %}{% if documents %}{% for d in documents %}{{ d.title }}={{ d['text'] }}{% endfor %}"
        "{% endif %}"
    ),
    "date": "{{ strftime_now('%Y') }} {{ strftime_now(format='%B') if strftime_now is defined else '' }}",
    "namespace and macro": (
        "{% set ns = namespace(n=0, text='') %}{% macro show(m, mark='-') %}{{ mark }}{{ m.content | upper }}"
        "{{ caller() if caller else '' }}{% endmacro %}{% for m in messages %}"
        "{% set ns.n = ns.n + m.content | length %}{% call show(m, mark='*') %}!{% endcall %}{% endfor %}{{ ns.n }}"
    ),
    "strings and lists": (
        "{{ messages[0].content.strip().split(' ')[-1] }}{{ messages[1:] | map(attribute='role') | join(',') }}"
        "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ messages[::-1][0].role }}"
        "{{ messages[-1]['content'].startswith('u') }}{{ dict(a=1).items() | list }}{{ 'x' ~ 3 }}{{ undefined_thing }}"
        "{{ none }}{{ true }}"
    ),
    "variables": "{{ bos_token }}|{{ eos_token }}|{{ unk_token is defined }}|{{ image_token }}|{{ mode | d('off') }}",
    "only alternating": (
        "{% if messages[0].role == 'system' %}{% set messages = messages[1:] %}{% endif %}{% for m in messages %}"
        "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('must alternate') }}{% endif %}"
        "{{ m.content }}{% endfor %}"
    ),
}  # fmt: skip


def pair(folder: Path) -> tuple[Tokenizer, Any]:
    return Tokenizer.from_folder(folder), PreTrainedTokenizerFast.from_pretrained(folder)


def oracle_chat(oracle: Any, messages: list[dict[str, Any]], **options: Any) -> Any:
    return oracle.apply_chat_template(messages, return_dict=False, **{"add_generation_prompt": True} | options)


@pytest.mark.parametrize("adds_bos", [False, True], ids=["plain", "adds-bos"])
@pytest.mark.parametrize("build", [byte_level, sentencepiece])
def test_ids_and_text(tmp_path: Path, build: Any, adds_bos: bool) -> None:
    mine, oracle = pair(save(tmp_path, build(adds_bos=adds_bos), NAMES | {"unk_token": "<|end|>"}))
    assert mine.vocab_size == len(oracle)
    assert mine.special_tokens == oracle.special_tokens_map
    assert (mine.bos_token_id, list(mine.eos_token_ids)) == (oracle.bos_token_id, [oracle.eos_token_id])
    for text in TEXTS:
        if not (adds_bos and text.startswith("<s>")):
            assert mine.encode(text) == oracle(text).input_ids
        assert mine.encode(text, add_special_tokens=False) == oracle(text, add_special_tokens=False).input_ids
        ids = oracle(text).input_ids
        for skip in (True, False):
            assert mine.decode(ids, skip_special_tokens=skip) == oracle.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("flags", [{"add_bos_token": True, "add_eos_token": True}, {"add_bos_token": False}])
@pytest.mark.parametrize("adds_bos", [False, True], ids=["plain", "adds-bos"])
def test_the_post_processor_of_the_file_decides_on_bos(tmp_path: Path, adds_bos: bool, flags: dict[str, bool]) -> None:
    config = NAMES | {"tokenizer_class": "LlamaTokenizer"} | flags
    mine, oracle = pair(save(tmp_path, byte_level(adds_bos=adds_bos), config))
    assert mine.encode("hello") == oracle("hello").input_ids == [256] * adds_bos + list(b"hello")


TOKENS = st.sampled_from([*SPECIAL, *PLAIN_ADDED, "<new>", "<|image|>", "a", "Ġ"])
TOKEN_OBJECTS = st.fixed_dictionaries(
    {"__type": st.just("AddedToken"), "content": TOKENS},
    optional={flag: st.booleans() for flag in ("lstrip", "rstrip", "normalized", "single_word", "special")},
)
CONFIGS = st.fixed_dictionaries(
    {},
    optional={
        **{name: st.one_of(st.none(), TOKENS, TOKEN_OBJECTS) for name in ("bos_token", "eos_token", "pad_token")},
        "image_token": TOKENS,
        "extra_special_tokens": st.one_of(
            st.lists(TOKENS, max_size=2, unique=True), st.dictionaries(st.just("think_token"), TOKENS)
        ),
        "additional_special_tokens": st.lists(TOKENS, max_size=2, unique=True),
        "added_tokens_decoder": st.dictionaries(
            st.sampled_from(["256", "258", "262", "263"]),
            TOKEN_OBJECTS.map(lambda token: {key: token[key] for key in token if key != "__type"}),
            max_size=2,
        ),
        "split_special_tokens": st.booleans(),
    },
)


@given(CONFIGS, st.one_of(st.none(), st.fixed_dictionaries({}, optional={"eos_token": TOKENS, "cls_token": TOKENS})))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_special_tokens(tmp_path: Path, config: dict[str, Any], special_tokens_map: dict[str, str] | None) -> None:
    folder = save(tmp_path, byte_level(), config)
    (folder / "special_tokens_map.json").unlink(missing_ok=True)
    if special_tokens_map is not None:
        (folder / "special_tokens_map.json").write_text(json.dumps(special_tokens_map), encoding="utf-8")
    mine, oracle = pair(folder)
    assert mine.special_tokens == oracle.special_tokens_map
    assert mine.vocab_size == len(oracle)
    for text in [*TEXTS, "a <new> b<|image|>  «naïve x» a"]:
        ids = oracle(text).input_ids
        assert mine.encode(text) == ids
        assert mine.decode(ids) == oracle.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("name", TEMPLATES)
def test_b27_templates_render_as_in_transformers(tmp_path: Path, name: str) -> None:
    config = NAMES | {"image_token": "<|image|>", "chat_template": TEMPLATES[name]}
    mine, oracle = pair(save(tmp_path, byte_level(adds_bos=True), config))
    cases: list[dict[str, Any]] = [
        {},
        {"add_generation_prompt": False},
        {"tools": TOOLS},
        {"tools": [], "documents": DOCUMENTS},
        {"mode": "on", "bos_token": "<mine>"},
        {"chat_template": TEMPLATES["json"]},
    ]
    for options in cases:
        expected = oracle_chat(oracle, CHAT, tokenize=False, **options)
        assert mine.apply_chat_template(CHAT, tokenize=False, **options) == expected
        assert mine.apply_chat_template(CHAT, **options) == oracle_chat(oracle, CHAT, **options)


def test_b27_content_parts_and_tool_calls_are_passed_through(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% elif m.content %}{% for p in m.content %}"
        "{{ p.type }}:{{ p.text }}{% endfor %}{% else %}{{ m.tool_calls | tojson }}{% endif %}{% endfor %}"
    )
    mine, oracle = pair(save(tmp_path, byte_level(), NAMES | {"chat_template": template}))
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "é"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"ö": 1}}}]},
        {"role": "tool", "content": "22"},
    ]
    assert mine.apply_chat_template(messages, tokenize=False) == oracle_chat(oracle, messages, tokenize=False)


@pytest.mark.parametrize("content", ["Well, ", "  Well,\n", "Well", [{"type": "text", "text": "Well "}]])
@pytest.mark.parametrize("body", ["m.content", "m.content | trim", "m.content.rstrip() ~ '.'"])
def test_a_continued_message_ends_as_in_transformers(tmp_path: Path, body: str, content: Any) -> None:
    template = f"{{% for m in messages %}}<|user|>{{{{ {body} if m.content is string else m.content[0].text }}}}<|end|>"
    mine, oracle = pair(save(tmp_path, byte_level(), NAMES | {"chat_template": template + "{% endfor %}"}))
    messages = [*CHAT, {"role": "assistant", "content": content}]
    options: dict[str, Any] = {"continue_final_message": True, "tokenize": False}
    expected = oracle_chat(oracle, messages, add_generation_prompt=False, **options)
    assert mine.apply_chat_template(messages, **options) == expected


FILES: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "in the config": ({"chat_template": "config"}, {}),
    "in a file": ({}, {"chat_template__jinja": "file\n"}),
    "in both": ({"chat_template": "config"}, {"chat_template__jinja": "file"}),
    "a list in the config": (
        {"chat_template": [{"name": "default", "template": "one"}, {"name": "tool_use", "template": "two"}]},
        {},
    ),
    "a file wins over a list": (
        {"chat_template": [{"name": "default", "template": "one"}, {"name": "tool_use", "template": "two"}]},
        {"chat_template__jinja": "file"},
    ),
    "more files": (
        {"chat_template": "config"},
        {
            "chat_template__jinja": "file",
            "additional_chat_templates___tool_use__jinja": "more",
            "additional_chat_templates___rag__jinja": "rag",
        },
    ),
}


@pytest.mark.parametrize("where", FILES)
def test_b27_where_the_template_lies(tmp_path: Path, where: str) -> None:
    config, texts = FILES[where]
    mine, oracle = pair(save(tmp_path, byte_level(), NAMES | config, **texts))
    assert mine.chat_template == oracle.chat_template
    for tools in (None, TOOLS):
        expected = oracle_chat(oracle, CHAT, tools=tools, tokenize=False)
        assert mine.apply_chat_template(CHAT, tools=tools, tokenize=False) == expected
    if isinstance(mine.chat_template, dict):
        for name in mine.chat_template:
            expected = oracle_chat(oracle, CHAT, chat_template=name, tokenize=False)
            assert mine.apply_chat_template(CHAT, chat_template=name, tokenize=False) == expected


@pytest.mark.parametrize(
    "template", ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", TEMPLATES["only alternating"]]
)
def test_b27_what_transformers_refuses_is_refused(tmp_path: Path, template: str) -> None:
    mine, oracle = pair(save(tmp_path, byte_level(), NAMES | {"chat_template": template}))
    messages = [*CHAT, CHAT[-1]]
    with pytest.raises(jinja2.TemplateError) as theirs:
        oracle_chat(oracle, messages, tokenize=False)
    with pytest.raises(ValueError, match="the chat template") as caught:
        mine.apply_chat_template(messages, tokenize=False)
    assert str(theirs.value) in str(caught.value)


@pytest.mark.parametrize("with_bos", [True, False], ids=["bos-in-template", "no-bos-in-template"])
@pytest.mark.parametrize("build", [byte_level, sentencepiece])
def test_b25_exactly_the_bos_of_the_template(tmp_path: Path, build: Any, with_bos: bool) -> None:
    template = TEMPLATES["bos and roles" if with_bos else "no bos"]
    mine, oracle = pair(save(tmp_path, build(adds_bos=True), NAMES | {"chat_template": template}))
    ids = mine.apply_chat_template(CHAT)
    assert ids == oracle_chat(oracle, CHAT)
    assert ids.count(oracle.bos_token_id) == with_bos
    raw = mine.encode("hello")
    assert raw == oracle("hello").input_ids
    assert raw.count(oracle.bos_token_id) == 1
    if with_bos:
        text = mine.apply_chat_template(CHAT, tokenize=False)
        assert mine.encode(text, add_special_tokens=False) == ids
        with pytest.warns(UserWarning, match="the model sees it twice"):
            assert mine.encode(text) == oracle(text).input_ids


@pytest.mark.parametrize("build", [byte_level, sentencepiece])
def test_b24_streamed_text_is_what_transformers_decodes(tmp_path: Path, build: Any) -> None:
    mine, oracle = pair(save(tmp_path, build(adds_bos=True), NAMES))
    for text in TEXTS:
        ids = oracle(text).input_ids
        for end in range(len(ids) + 1):
            stream = TextStream(mine)
            streamed = "".join(stream.push([token_id]) for token_id in ids[:end]) + stream.finish()
            assert streamed == oracle.decode(ids[:end], skip_special_tokens=True)

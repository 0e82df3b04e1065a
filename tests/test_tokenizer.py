"""Text and messages to ids, compared with the stored output of transformers 5.19 on the same folder, and clear refusals."""

import datetime as dt
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from trio_rollout.errors import RequestRejected, SettingsError
from trio_rollout.tiny import DATA
from trio_rollout.tokenizer import Tokenizer, load_tokenizer
from trio_rollout.tokenizer._tokenizer import LARGE_TEXT

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<img>"]  # ids 256 to 260; hello is 261

# Uses what real templates use: whitespace control, namespaces, loop controls, tojson, generation blocks, named tokens.
TEMPLATE = r"""{%- set ns = namespace(n=0) %}
{{- bos_token }}
{%- if tools %}
    {{- '<|im_start|>system\n# Tools\n' }}
    {%- for tool in tools %}
        {{- tool | tojson }}
        {{- tool | tojson(indent=2) }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endif %}
{% for m in messages %}
    {% if m.role == 'skip' %}{% continue %}{% endif %}
    {% if m.role == 'bad' %}{{ raise_exception('roles must alternate, not ' ~ m.role) }}{% endif %}
    {%- set ns.n = ns.n + 1 %}
<|im_start|>{{ m.role }}
    {% generation %}{% set x = 5 %}{{ m.content | trim }}{% endgeneration %}{{ x }}
{{ eos_token }}{{ "<&>é" | tojson }}{{ image_token }}{{ pad_token }}|{{ unk_token }}
{% endfor %}
{{ strftime_now('%d %b %Y') }}
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

MESSAGES = [
    {"role": "user", "content": " hello  wörld <|im_end|> "},
    {"role": "skip", "content": "no"},
    {"role": "assistant", "content": "ok\n"},
]
TOOLS = [{"type": "function", "function": {"name": "f<&>é", "parameters": {"b": 1, "a": [1, 2.5, None]}}}]

RENDERED_TOOLS = (
    '<|im_start|>system\n# Tools\n{"type": "function", "function": {"name": "f<&>é", "parameters": {"b": 1, "a": [1, '
    '2.5, null]}}}{\n  "type": "function",\n  "function": {\n    "name": "f<&>é",\n    "parameters": {\n      "b": 1,\n'
    '      "a": [\n        1,\n        2.5,\n        null\n      ]\n    }\n  }\n}<|im_end|>\n'
)
RENDERED_MESSAGES = (
    '<|im_start|>user\nhello  wörld <|im_end|>\n</s>"<&>é"<img><|im_end|>|</s>\n'
    '<|im_start|>assistant\nok\n</s>"<&>é"<img><|im_end|>|</s>\n29 Nov 2026\n'
)


def added(content: str) -> dict[str, object]:
    """Return a special token as transformers writes it."""
    return {"__type": "AddedToken", "content": content, "lstrip": False, "normalized": False, "special": True}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write a byte-level tokenizer with special tokens, a BOS, and the truncation and padding of a training run."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(models.BPE(vocab={char: place for place, char in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(SPECIAL)
    made.add_tokens(["hello"])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    made.enable_truncation(4)
    made.enable_padding(length=50)
    made.save(str(tmp_path / "tokenizer.json"))
    configure(
        tmp_path,
        bos_token="<s>",
        eos_token=added("</s>"),
        extra_special_tokens={"image_token": "<img>"},
        chat_template=TEMPLATE,
    )
    special = {"pad_token": "<|im_end|>", "unk_token": added("</s>"), "eos_token": "<s>"}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(special), encoding="utf-8")
    return tmp_path


def configure(folder: Path, **config: object) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def on_that_day() -> dt.datetime:
    return dt.datetime(2026, 11, 29, 12, tzinfo=dt.UTC)


@pytest.fixture
def tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of the folder."""
    return load_tokenizer(folder, now=on_that_day)


def test_text_becomes_ids_with_the_special_tokens_around_it(tokenizer: Tokenizer):
    """The text is neither cut nor padded, although the file says so."""
    assert tokenizer.encode("hello") == [256, 261]
    assert tokenizer.encode("hi you") == [256, 71, 72, 220, 88, 78, 84]
    assert tokenizer.encode("") == [256]


def test_special_tokens_around_it_can_be_left_out_and_those_within_are_ids(tokenizer: Tokenizer):
    assert tokenizer.encode("hi</s>", add_special_tokens=False) == [71, 72, 257]


@pytest.mark.parametrize("text", ["hello wörld", "  a\n\n b ", "日本語 🙂"])
def test_decoding_gives_the_text_back(tokenizer: Tokenizer, text: str):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == f"<s>{text}"
    assert tokenizer.decode(np.array(ids, np.int32), skip_special_tokens=True) == text


def test_messages_are_rendered_as_transformers_renders_them(tokenizer: Tokenizer):
    assert tokenizer.render_chat(MESSAGES, add_generation_prompt=False) == f"<s>{RENDERED_MESSAGES}"
    assert tokenizer.render_chat(MESSAGES, TOOLS) == f"<s>{RENDERED_TOOLS}{RENDERED_MESSAGES}<|im_start|>assistant\n"


def test_messages_become_the_ids_of_their_text_without_another_bos(tokenizer: Tokenizer):
    ids = tokenizer.apply_chat_template(MESSAGES)
    assert ids == tokenizer.encode(tokenizer.render_chat(MESSAGES), add_special_tokens=False)
    assert ids[:2] == [256, 258]


def test_a_tokenizer_knows_its_size_and_its_end(folder: Path, tokenizer: Tokenizer):
    """Added tokens count; the configuration takes precedence over special_tokens_map.json."""
    assert tokenizer.vocab_size == 262
    assert tokenizer.eos_token_id == 257
    assert repr(tokenizer) == f"<Tokenizer {str(folder)!r}, 262 tokens, with a chat template>"


def test_the_file_alone_is_enough(folder: Path):
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        (folder / name).unlink()

    tokenizer = load_tokenizer(str(folder / "tokenizer.json"))

    assert tokenizer.encode("hi") == [256, 71, 72]
    assert tokenizer.eos_token_id is None
    with pytest.raises(RequestRejected, match=r"messages can't be encoded: .* has neither chat_template\.jinja nor"):
        tokenizer.apply_chat_template(MESSAGES)


def test_a_template_file_wins_over_the_configuration(folder: Path):
    (folder / "chat_template.jinja").write_text("{{ messages | length }} messages", encoding="utf-8")
    assert load_tokenizer(folder).render_chat(MESSAGES) == "3 messages"


def test_of_several_templates_the_one_for_tools_is_used_with_tools(folder: Path):
    named = {"default": "plain", "tool_use": "{{ tools | length }} tools", "rag": "other"}
    configure(folder, chat_template=[{"name": name, "template": text} for name, text in named.items()])
    tokenizer = load_tokenizer(folder)
    assert tokenizer.render_chat(MESSAGES) == "plain"
    assert tokenizer.render_chat(MESSAGES, TOOLS) == "1 tools"


def test_templates_without_a_default_refuse_what_they_are_not_for(folder: Path):
    configure(folder, chat_template=[{"name": "rag", "template": "x"}])
    with pytest.raises(RequestRejected, match=r"has no chat template 'default', only \['rag'\]"):
        load_tokenizer(folder).render_chat(MESSAGES)


def test_messages_that_a_template_refuses_are_rejected_with_its_words(tokenizer: Tokenizer):
    with pytest.raises(RequestRejected, match="refused the messages: roles must alternate, not bad"):
        tokenizer.apply_chat_template([{"role": "bad", "content": ""}])


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ messages[0]['content'].nothing.more }}", "refused the messages: .*has no attribute 'nothing'"),
        ("{{ 1 / 0 }}", "refused the messages: division by zero"),
        ("{{ messages.append(1) }}", "refused the messages: access to attribute 'append' .* is unsafe"),
        ("{{ ''.__class__.__mro__ }}", "refused the messages: access to attribute '__class__' .* is unsafe"),
    ],
)
def test_a_template_is_a_foreign_program_in_a_sandbox(folder: Path, template: str, message: str):
    configure(folder, chat_template=template)
    with pytest.raises(RequestRejected, match=message):
        load_tokenizer(folder).render_chat(MESSAGES)


def write(name: str, text: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_text(text, encoding="utf-8")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (write("tokenizer.json", "{"), "tokenizer.json can't be loaded: "),
        (write("tokenizer.json", "{}"), "tokenizer.json can't be loaded: "),
        (lambda folder: (folder / "tokenizer.json").write_bytes(b"\xff"), "tokenizer.json can't be loaded: "),
        (lambda folder: (folder / "tokenizer.json").unlink(), "allowed: a folder with tokenizer.json, or such a file"),
        (write("tokenizer_config.json", "{"), "tokenizer_config.json is not JSON: "),
        (write("tokenizer_config.json", "[]"), "tokenizer_config.json must be a JSON object, got list"),
        (write("special_tokens_map.json", "1"), "special_tokens_map.json must be a JSON object, got int"),
        (lambda folder: (folder / "chat_template.jinja").write_bytes(b"\xff"), "chat_template.jinja can't be read: "),
        (write("chat_template.jinja", "\n{% if %}"), "chat_template.jinja, line 2: "),
        (
            lambda folder: configure(folder, chat_template=5),
            "'chat_template' of .* must be a text, or a list of objects",
        ),
        (lambda folder: configure(folder, chat_template=[{"name": "a"}]), "must be a text, or a list of objects"),
        (
            lambda folder: configure(folder, chat_template=[{"name": "a", "template": 1}]),
            "must be a text, or a list of",
        ),
    ],
)
def test_a_folder_that_is_not_what_it_should_be_is_refused(folder: Path, spoil: Callable[[Path], Any], message: str):
    spoil(folder)
    with pytest.raises(SettingsError, match=message) as caught:
        load_tokenizer(folder)
    assert re.search(r"^(tokenizer: |chat template of )", str(caught.value))
    assert str(folder) in str(caught.value)


def test_a_path_that_is_not_there_is_refused(tmp_path: Path):
    with pytest.raises(SettingsError, match=r"tokenizer: got '.*/none', allowed: a folder with tokenizer\.json"):
        load_tokenizer(tmp_path / "none")


def test_without_a_clock_a_template_prints_the_local_date(folder: Path):
    configure(folder, chat_template="{{ strftime_now('%Y') }}")
    assert int(load_tokenizer(folder).render_chat(MESSAGES)) >= 2024


def test_a_process_may_fork_after_encoding(folder: Path):
    """The library warns about a fork after it has used its threads; encoding one text uses none."""
    program = (
        "import os, sys; from trio_rollout.tokenizer import load_tokenizer\n"
        "tokenizer = load_tokenizer(sys.argv[1]); tokenizer.encode('hello ' * 10000)\n"
        "child = os.fork()\n"
        "tokenizer.encode('hello'); child and os.waitpid(child, 0)\n"
    )
    answer = subprocess.run([sys.executable, "-c", program, folder], capture_output=True, text=True, check=True)
    assert (answer.stdout, answer.stderr) == ("", "")


@pytest.mark.parametrize("piece", ["word ", "<|im_end|>", "é漢字 ", "\n\n", "{} <s>", "x" * 50], ids=ascii)
@pytest.mark.parametrize("added", [True, False])
def test_a_large_text_gets_the_ids_that_a_small_one_gets(piece, added):
    """A large text is encoded by another function of the library."""
    tokenizer, line = load_tokenizer(DATA), piece * 10 + "\n"
    text = line * (LARGE_TEXT // len(line) + 1)

    ids = tokenizer.encode(text, add_special_tokens=added)

    assert len(text) > LARGE_TEXT
    assert ids == tokenizer._backend.encode(text, add_special_tokens=added).ids

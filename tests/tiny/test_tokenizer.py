"""The shipped tokenizer: every text comes back, bytes are their own ids, and its template knows tools."""

import json

import jinja2.sandbox
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_rollout.tiny import DATA, TinyTokenizer

TOKENIZER = TinyTokenizer.load()
CONFIG = json.loads((DATA / "tokenizer_config.json").read_text(encoding="utf-8"))


def rendered(messages, **options) -> str:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = json.dumps  # as in transformers: jinja's own escapes for HTML
    return environment.from_string(CONFIG["chat_template"]).render(messages=messages, **options)


@given(st.text())
def test_every_text_comes_back(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text), skip_special=False) == text


@given(st.lists(st.integers(0, TOKENIZER.vocab - 1)), st.booleans())
def test_decoding_is_the_librarys(ids, skip):
    assert TOKENIZER.decode(ids, skip_special=skip) == TOKENIZER._tokenizer.decode(ids, skip_special_tokens=skip)


@given(st.lists(st.integers(0, TOKENIZER.vocab - 1)), st.integers(0, 30))
def test_what_is_decoded_early_never_changes(ids, cut):
    early = TOKENIZER.decode(ids[:cut], final=False)

    assert TOKENIZER.decode(ids).startswith(early)


def test_a_byte_is_its_own_id():
    assert [TOKENIZER.piece(byte) for byte in range(256)] == [bytes([byte]) for byte in range(256)]


def test_the_files_agree_on_the_vocabulary():
    config = json.loads((DATA / "config.json").read_text(encoding="utf-8"))

    assert TOKENIZER.vocab == config["vocab_size"] >= 512
    assert TOKENIZER.end_id == config["eos_token_id"] == TOKENIZER.encode(CONFIG["eos_token"])[0]
    assert config["max_position_embeddings"] >= 65_536


def test_special_tokens_are_one_token_each():
    text = "<|endoftext|><|im_start|><|im_end|><tool_call></tool_call><tool_response></tool_response><think></think>"

    assert TOKENIZER.encode(text) == list(range(256, 265))
    assert TOKENIZER.decode(range(256, 265)) == text.partition("<|im_end|>")[2], "markers of tools are shown"


def test_an_id_that_only_the_model_knows_has_no_text():
    assert TOKENIZER.decode([72, TOKENIZER.vocab + 5, 105]) == "Hi"


def test_a_conversation_is_rendered():
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "U"},
        {"role": "assistant", "content": "A"},
    ]
    expected = "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n"

    assert rendered(messages) == expected
    assert rendered(messages[1:2], add_generation_prompt=True).endswith("U<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("arguments", [{"command": "ls"}, '{"command": "ls"}'])
def test_tools_and_their_calls_are_rendered(arguments):
    function = {"name": "bash", "arguments": arguments}
    messages = [
        {"role": "user", "content": "U"},
        {"role": "assistant", "content": "Let me see.", "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "content": "main.py"},
        {"role": "tool", "content": "test.py"},
    ]
    text = rendered(messages, tools=[{"type": "function", "function": {"name": "bash"}}], add_generation_prompt=True)

    assert text.startswith("<|im_start|>system\n# Tools\n")
    assert '\n{"type": "function", "function": {"name": "bash"}}\n</tools>' in text
    call = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
    assert f"<|im_start|>assistant\nLet me see.\n{call}<|im_end|>\n" in text
    responses = "\n<tool_response>\nmain.py\n</tool_response>\n<tool_response>\ntest.py\n</tool_response>"
    assert text.endswith(f"<|im_start|>user{responses}<|im_end|>\n<|im_start|>assistant\n")


def test_a_system_message_stands_before_the_tools():
    text = rendered([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "U"}], tools=[{"a": 1}])

    assert text.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n")
    assert text.count("Be brief.") == 1

"""From messages to ids: a turn continues the sampled ids of the turn before, or is a new branch, never silently other ids."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_rollout import Stop, Turn, VersionSpan
from trio_rollout._core.token_tree import Drift
from trio_rollout.errors import RequestRejected
from trio_rollout.gateway._conversation import Conversation
from trio_rollout.gateway._turn import StreamingText
from trio_rollout.tiny import DATA
from trio_rollout.tiny._app import separate_reasoning
from trio_rollout.tokenizer import load_tokenizer

TOKENIZER = load_tokenizer(DATA)
END = TOKENIZER.eos_token_id


def turn_of(prompt_ids, output_ids):
    return Turn(
        rid="r",
        prompt_ids=prompt_ids,
        output_ids=output_ids,
        log_probs=[-0.5] * len(output_ids),
        text=TOKENIZER.decode(output_ids, skip_special_tokens=True),
        stop=Stop.STOP,
        weight_version=0,
        versions=[VersionSpan(0, len(output_ids), 0)],
    )


def byte_ids(text):
    """Return a text as the model might sample it and no tokenizer would encode it: one token a byte."""
    return [*text.encode(), END]


def say(conversation, messages, output_ids, *, tools=(), **more):
    """Sample this answer to these messages; return the placement, and the messages with the answer after them."""
    placement = conversation.place(messages, tools)
    turn = turn_of(placement.prompt_ids, output_ids)
    answer = {"role": "assistant", "content": turn.text, **more}
    conversation.record(messages, tools, answer, turn)
    return placement, [*messages, {"role": "assistant", "content": turn.text}]


def user(text):
    return {"role": "user", "content": text}


def test_sampled_ids_that_the_text_would_not_become_are_kept():
    conversation = Conversation(TOKENIZER)
    first, messages = say(conversation, [user("hi")], byte_ids("Let me look at the file"))
    second, _ = say(conversation, [*messages, user("more")], byte_ids("done"))

    assert (first.drift, second.drift) == (Drift.NONE, Drift.REUSED)
    kept = [*first.prompt_ids.tolist(), *byte_ids("Let me look at the file")]
    assert second.prompt_ids[: len(kept)].tolist() == kept
    (row,) = conversation.tree.segments()
    assert int(row.loss_mask.sum()) == len(byte_ids("Let me look at the file")) + len(byte_ids("done"))


def test_ids_that_agree_are_no_drift():
    conversation = Conversation(TOKENIZER)
    _, messages = say(conversation, [user("hi")], [*TOKENIZER.encode("Hello there"), END])
    second, _ = say(conversation, [*messages, user("more")], byte_ids("done"))

    assert second.drift is Drift.NONE
    whole = TOKENIZER.apply_chat_template([*messages, user("more")])
    assert second.prompt_ids.tolist() == whole


def test_an_answer_that_was_cut_off_gets_its_end_mark_as_context():
    conversation = Conversation(TOKENIZER)
    _, messages = say(conversation, [user("hi")], list(b"cut of"))
    second, _ = say(conversation, [*messages, user("go on")], byte_ids("f"))

    text = TOKENIZER.decode(second.prompt_ids)
    assert "cut of<|im_end|>\n<|im_start|>user\ngo on<|im_end|>" in text
    assert len(conversation.tree.segments()) == 1


def test_a_rewritten_answer_is_another_branch():
    conversation = Conversation(TOKENIZER)
    _, messages = say(conversation, [user("hi")], byte_ids("first"))
    messages[-1] = {"role": "assistant", "content": "other words"}
    second, _ = say(conversation, [*messages, user("more")], byte_ids("done"))

    assert second.drift is Drift.NONE
    assert len(conversation.tree.segments()) == 2


def test_an_answer_whose_calls_are_written_into_its_text_is_recognised():
    """smolagents tells its history so. The ids of the calls are random: no other text can have them."""
    conversation = Conversation(TOKENIZER)
    call = {"id": "call_5e1f", "type": "function", "function": {"name": "look", "arguments": {"at": "it"}}}
    _, messages = say(conversation, [user("hi")], byte_ids("I look."), tool_calls=[call])
    messages[-1] = {"role": "assistant", "content": f"I look.\nCalling tools:\n[{call}]"}
    second, messages = say(conversation, [*messages, user("Observation: it is there")], byte_ids("done"))
    third, _ = say(conversation, [*messages, user("thanks")], byte_ids("welcome"))

    assert (second.drift, third.drift) == (Drift.REUSED, Drift.REUSED)
    assert len(conversation.tree.segments()) == 1


@pytest.mark.parametrize(
    "told", ["Calling tools: ['call_0000']", "I look. call_5e1f"], ids=["another call", "one call of two"]
)
def test_an_answer_is_recognised_by_all_of_its_calls_only(told):
    conversation = Conversation(TOKENIZER)
    calls = [
        {"id": name, "type": "function", "function": {"name": "look", "arguments": {}}}
        for name in ("call_5e1f", "call_5e20")
    ]
    _, messages = say(conversation, [user("hi")], byte_ids("I look."), tool_calls=calls)
    messages[-1] = {"role": "assistant", "content": told}
    say(conversation, [*messages, user("Observation: it is there")], byte_ids("done"))

    assert len(conversation.tree.segments()) == 2


def test_compaction_and_sub_agents_are_branches():
    conversation = Conversation(TOKENIZER)
    _, messages = say(conversation, [user("hi")], byte_ids("first"))
    _, messages = say(conversation, [*messages, user("more")], byte_ids("second"))
    say(conversation, [user("title?")], byte_ids("a title"))
    say(conversation, [user("summary of all that"), user("go on")], byte_ids("third"))

    rows = conversation.tree.segments()
    assert len(rows) == 3
    assert sum(int(row.loss_mask.sum()) for row in rows) == sum(
        len(byte_ids(text)) for text in ("first", "second", "a title", "third")
    )


def test_other_tools_are_another_prompt():
    """Tools stand at the beginning of the prompt: recorded ids with other tools in front of them would be wrong."""
    conversation = Conversation(TOKENIZER)
    tool = {"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}
    _, messages = say(conversation, [user("hi")], byte_ids("first"), tools=(tool,))
    say(conversation, [*messages, user("more")], byte_ids("second"))

    assert len(conversation.tree.segments()) == 2


def test_spacing_and_key_order_of_arguments_do_not_matter():
    conversation = Conversation(TOKENIZER)
    sampled = byte_ids('<tool_call>\n{"name": "f", "arguments": {"a": 1, "b": 2}}\n</tool_call>')
    placement = conversation.place([user("hi")], ())
    turn = turn_of(placement.prompt_ids, sampled)

    def answer(arguments):
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        return {"role": "assistant", "content": "", "tool_calls": [call]}

    conversation.record([user("hi")], (), answer({"a": 1, "b": 2}), turn)
    second = conversation.place(
        [user("hi"), {**answer({"b": 2, "a": 1}), "content": None}, {"role": "tool", "content": "x"}], ()
    )

    assert second.drift is Drift.REUSED
    assert second.prompt_ids[: len(placement.prompt_ids) + len(sampled)].tolist()[-len(sampled) :] == sampled


class Forgetful:
    """A template that drops thoughts as soon as something follows, as some models' do."""

    eos_token_id = END
    added_tokens = TOKENIZER.added_tokens
    encode = staticmethod(TOKENIZER.encode)
    decode = staticmethod(TOKENIZER.decode)

    def render_chat(self, messages, tools=None, *, add_generation_prompt=True):
        last = len(messages) - 1
        text = ""
        for place, message in enumerate(messages):
            thoughts = message.get("reasoning_content", "") if place == last else ""
            text += f"<|im_start|>{message['role']}\n{thoughts}{message['content']}<|im_end|>\n"
        return text + ("<|im_start|>assistant\n" if add_generation_prompt else "")


def test_a_template_that_forgets_thoughts_forks():
    conversation = Conversation(Forgetful())
    say_it = {"reasoning_content": "<think>hm</think>"}
    _, messages = say(conversation, [user("hi")], byte_ids("<think>hm</think>yes"), **say_it)
    key_message = {"role": "assistant", "content": "<think>hm</think>yes"}
    assert messages[-1] == key_message
    second, _ = say(conversation, [*messages, user("more")], byte_ids("done"))

    assert second.drift is Drift.FORKED
    assert len(conversation.tree.segments()) == 2


TEXTS = st.text(alphabet='ab <>{}\n"é漢', min_size=1, max_size=12)


@given(st.lists(st.tuples(TEXTS, TEXTS, st.booleans(), st.booleans()), min_size=1, max_size=5))
def test_sampled_ids_are_trained_as_they_were_sampled(turns):
    """A linear conversation is one row with every id, sampled byte by byte or as the tokenizer encodes, ended or cut."""
    conversation, messages, sampled = Conversation(TOKENIZER), [], []
    for asked, answered, by_bytes, ended in turns:
        ids = list(answered.encode()) if by_bytes else TOKENIZER.encode(answered)
        ids = [*ids, END] if ended else ids
        sampled += ids
        _, messages = say(conversation, [*messages, user(asked)], ids)

    (row,) = conversation.tree.segments()

    response = row.tokens[len(row.tokens) - row.response_length :]
    assert response[row.loss_mask == 1].tolist() == sampled


@given(
    text=st.text(max_size=20), pieces=st.lists(st.integers(1, 5), max_size=20), stop=st.sampled_from(["", "ab", "é"])
)
def test_the_shown_text_is_always_a_beginning_of_the_final_text(text, pieces, stop):
    ids = [*text.encode(), END]
    streaming = StreamingText(TOKENIZER, parses_markup=False, stop=(stop,) if stop else ())
    whole = text.split(stop, 1)[0] if stop else text
    upto, shown = 0, ""
    for size in [*pieces, len(ids)]:
        upto = min(len(ids), upto + size)
        streaming.feed(ids[:upto])
        assert streaming.text.startswith(shown)
        shown = streaming.text
        assert whole.startswith(shown)


def test_markup_is_held_back():
    ids = TOKENIZER.encode("I look. \n<tool_call>\n{}")
    held, open_ = StreamingText(TOKENIZER, parses_markup=True), StreamingText(TOKENIZER, parses_markup=False)
    for size in range(len(ids) + 1):
        held.feed(ids[:size])
        open_.feed(ids[:size])

    assert held.text == "I look."
    assert open_.text == "I look. \n<tool_call>\n{}"


def test_a_template_that_refuses_is_a_refusal():
    with pytest.raises(RequestRejected):
        Conversation(TOKENIZER).place([{"role": "user"}], ())


@given(
    parts=st.lists(st.sampled_from(["</think>", "<tool_call>", "hm", " and", "\n", "漢", " ", "yes."]), max_size=12),
    begins=st.sampled_from(["", "<think>"]),
    begins_inside=st.booleans(),
    answers=st.lists(st.booleans(), min_size=40, max_size=40),
)
def test_streamed_thoughts_and_text_agree_with_the_parsers_final_answer(parts, begins, begins_inside, answers):
    """No text is shown that must be taken back, for any tokens and any delay of the parser's answers."""
    streaming = StreamingText(TOKENIZER, parses_markup=True, finds_thoughts=True)
    written = begins + "".join(parts)
    ids = TOKENIZER.encode(written, add_special_tokens=False)

    for upto in range(1, len(ids) + 1):
        streaming.feed(ids[:upto])
        while streaming.unclassified is not None and answers and answers.pop():
            parsed = separate_reasoning(streaming.unclassified, begins_inside=begins_inside)
            streaming.classify(parsed["reasoning_text"], parsed["text"])

    final = separate_reasoning(written, begins_inside=begins_inside)
    assert final["reasoning_text"].startswith(streaming.thoughts)
    assert final["text"].lstrip().startswith(streaming.text)

"""Answers become Turns, and damaged answers become errors that name the damage."""

import base64
import json

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_rollout import PauseMode, SamplingParams, Stop
from trio_rollout._core.arrays import id_array
from trio_rollout._core.segments import segments_of
from trio_rollout._core.weights import Weights
from trio_rollout.errors import RequestRejected, ServerBusy, ServerError, SettingsError
from trio_rollout.sglang import _wire as wire

from .helpers import Asked

pytestmark = pytest.mark.usefixtures("decoder")

RID = "0123456789abcdef" * 2
QUEUED_ABORT = {
    "id": RID,
    "finish_reason": {"type": "abort", "message": "Abort in waiting queue"},
    "weight_version": "3",
}


def request(model_input=(1, 2, 3), *, sampling=None, extra={}, vocab_size=None):  # noqa: B006
    return wire.RequestEncoder(vocab_size).encode(model_input, sampling or SamplingParams(), extra)


def answer(**changes):
    meta = {
        "id": RID,
        "finish_reason": {"type": "stop", "matched": 2},
        "completion_tokens": 3,
        "cached_tokens": 1,
        "weight_version": "4",
        "weight_versions": [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 3}],
        "output_token_logprobs": [[-1.0, 7, None], [-2.5, 8, "x"], [-0.25, 9]],
        "queue_time": 0.5,
        "e2e_latency": 2,
    } | changes.pop("meta", {})
    meta = {name: value for name, value in meta.items() if value != "absent"}
    return {"text": "abc", "output_ids": [7, 8, 9], "meta_info": meta} | changes


def asked(of=None, version_of=None):
    numbers = version_of or (lambda name: int(name or -1))
    return Asked(attempted="POST x", rid=RID, request=of or request(), version_of=numbers)


def decode(value, of=None, version_of=None):
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    return wire.decode_turn(body, asked(of, version_of))


@pytest.mark.parametrize("spaces", [False, True], ids=["compact", "spaced"])
def test_an_answer_becomes_a_turn(spaces):
    turn = decode(json.dumps(answer(), separators=None if spaces else (",", ":")).encode())

    assert turn.rid == RID
    assert turn.prompt_ids.tolist() == [1, 2, 3]
    assert turn.output_ids.tolist() == [7, 8, 9]
    assert turn.log_probs.tolist() == [-1.0, -2.5, -0.25]
    assert (turn.output_ids.dtype, turn.log_probs.dtype) == (np.int32, np.float32)
    assert not turn.output_ids.flags.writeable
    assert not turn.log_probs.flags.writeable
    assert turn.versions == ((0, 1, 3), (1, 3, 4))
    assert (turn.weight_version, turn.stop, turn.text, turn.cached_tokens) == (4, Stop.STOP, "abc", 1)
    assert (turn.queue_s, turn.latency_s) == (0.5, 2.0)
    assert turn.meta_info["finish_reason"] == {"type": "stop", "matched": 2}
    assert "output_token_logprobs" not in turn.meta_info


@pytest.mark.parametrize(
    "body",
    [answer(), answer(meta={"weight_versions": []}), {"text": "", "output_ids": [], "meta_info": QUEUED_ABORT}],
    ids=["of two versions", "of one version", "without tokens"],
)
@pytest.mark.parametrize("separators", [None, (",", ":")], ids=["spaced", "compact"])
def test_decoded_turns_and_rows_are_as_their_converters_make_them(body, separators):
    """Both skip the converters: each field has to be the very object that a converter would hand on."""
    turn = decode(json.dumps(body, separators=separators).encode())
    for made in (turn, *segments_of([turn])):
        again = attrs.evolve(made)
        assert again == made
        for field in attrs.fields(type(made)):
            assert getattr(again, field.name) is getattr(made, field.name), field.name


def test_a_queued_abort_has_a_shorter_record_and_no_tokens():
    turn = decode({"text": "", "output_ids": [], "meta_info": QUEUED_ABORT})

    assert turn.stop is Stop.ABORT
    assert len(turn.output_ids) == len(turn.log_probs) == 0
    assert (turn.versions, turn.weight_version) == ((), 3)


def test_one_step_that_lands_after_an_abort_has_a_version_too():
    meta = {"finish_reason": {"type": "abort", "message": "Aborted"}, "completion_tokens": 2}
    turn = decode(answer(meta=meta | {"weight_versions": [{"version": "3", "start": 0, "end": 2}]}))

    assert turn.versions == ((0, 3, 3),)


def test_without_spans_the_scalar_counts():
    assert decode(answer(meta={"weight_versions": "absent"})).versions == ((0, 3, 4),)


def test_empty_spans_are_left_out():
    spans = [{"version": "1", "start": 0, "end": 0}, {"version": "2", "start": 0, "end": 3}]
    assert decode(answer(meta={"weight_versions": spans})).versions == ((0, 3, 2),)


def test_a_text_prompt_comes_back_as_ids():
    turn = decode(answer(prompt_token_ids=[5, 6]), of=request("hello"))

    assert turn.prompt_ids.tolist() == [5, 6]


DAMAGE = {
    "not JSON": (b"{", "not with an answer"),
    "another type": ([1, 2], "not with an answer"),
    "nested without end": (
        json.dumps(answer(meta={"x": 7})).replace("7}", "[" * 5000 + "]" * 5000 + "}").encode(),
        "recursion",
    ),
    "no meta_info": ({"text": "x", "output_ids": []}, "meta_info"),
    "no finish reason": (answer(meta={"finish_reason": "absent"}), "finish_reason"),
    "unfinished": (answer(meta={"finish_reason": None}), "finish_reason"),
    "unknown finish reason": (answer(meta={"finish_reason": {"type": "tired"}}), "tired"),
    "F072 no log-probs": (answer(meta={"output_token_logprobs": "absent"}), "output_token_logprobs is missing"),
    "F072 null log-probs": (answer(meta={"output_token_logprobs": None}), "output_token_logprobs is missing"),
    "F071 fewer log-probs": (answer(meta={"output_token_logprobs": [[-1, 7]]}), "3 output_ids but 1"),
    "F071 another token": (answer(meta={"output_token_logprobs": [[-1, 7], [-1, 8], [-1, 10]]}), r"output_ids\[2\]"),
    "F071 null log-prob": (
        answer(meta={"output_token_logprobs": [[-1, 7], [None, 8], [-1, 9]]}),
        r"output_token_logprobs.*\[1\]",
    ),
    "a log-prob that is a string": (answer(meta={"output_token_logprobs": [["-1", 7]]}), "not with an answer"),
    "a negative id": (answer(output_ids=[7, 8, -9]), r"output_ids.*\[2\]"),
    "an id beyond 31 bits": (answer(output_ids=[7, 8, 2**31]), r"output_ids.*\[2\]"),
    "a negative id in both": (
        answer(output_ids=[7, -8, 9], meta={"output_token_logprobs": [[-1, 7], [-1, -8], [-1, 9]]}),
        "-8",
    ),
    "an id beyond 31 bits in both": (
        answer(output_ids=[2**31], meta={"output_token_logprobs": [[-1, 2**31]], "completion_tokens": 1}),
        "2147483648|not a token id|out of",
    ),
    "another request's": (answer(meta={"id": "f" * 32}), "for request"),
    "another count": (answer(meta={"completion_tokens": 4}), "completion_tokens is 4"),
    "spans with a hole": (answer(meta={"weight_versions": [{"version": "1", "start": 1, "end": 3}]}), "do not tile"),
    "spans that are none": (answer(meta={"weight_versions": [3]}), "malformed"),
    "spans without a version": (answer(meta={"weight_versions": [{"start": 0, "end": 3}]}), "malformed"),
    "spans over nothing": (answer(meta={"weight_versions": [{"version": "1", "start": 0, "end": 0}]}), "no token"),
}


@pytest.mark.parametrize("separators", [None, (",", ":")], ids=["spaced", "compact"])
@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_answer_is_an_error_that_names_the_field(name, separators):
    value, words = DAMAGE[name]
    with pytest.raises(ServerError, match=words) as caught:
        decode(value if isinstance(value, bytes) else json.dumps(value, separators=separators).encode())
    assert "POST x" in str(caught.value)


def test_a_text_prompt_whose_ids_are_missing_is_an_error():
    with pytest.raises(ServerError, match="prompt_token_ids"):
        decode(answer(), of=request("hello"))


@pytest.mark.parametrize(
    ("status", "kind"), [(400, RequestRejected), (429, ServerBusy), (503, ServerBusy), (500, ServerError)]
)
def test_an_engines_own_abort_counts_as_the_status_it_names(status, kind):
    reason = {"type": "abort", "status_code": status, "message": "The request queue is full."}
    with pytest.raises(kind, match="queue is full"):
        decode(answer(meta={"finish_reason": reason}))


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=3), st.lists, max_leaves=6), st.data())
def test_fuzz_any_value_anywhere_gives_a_turn_or_a_server_error(value, data):
    """Whatever stands in one field of an answer, nothing but a ServerError comes out, or a Turn that agrees with itself."""
    damaged = answer()
    where = data.draw(st.sampled_from(["text", "output_ids", "prompt_token_ids", *damaged["meta_info"]]))
    (damaged if where in {"text", "output_ids", "prompt_token_ids"} else damaged["meta_info"])[where] = value
    try:
        turn = decode(damaged, version_of=lambda name: Weights().version_of(name, Weights().now))
    except ServerError:
        return
    assert len(turn.output_ids) == len(turn.log_probs)


# --- errors


@pytest.mark.parametrize(
    "body",
    [
        {"error": {"message": "too long"}},
        {"error": "too long"},
        {"object": "error", "message": "too long", "type": "Bad Request", "param": None, "code": 400},
        {"detail": [{"loc": ["body"], "msg": "too long"}]},
        {"detail": "too long"},
    ],
)
def test_the_servers_words_are_found_in_every_shape_of_error(body):
    assert wire.words_of(json.dumps(body).encode()) == "too long"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>Bad Gateway</html>",
        b"\xff\xfe",
        b"[]",
        b"null",
        b"{}",
        b'{"error":null}',
        b"[" * 5000 + b"]" * 5000,
    ],
)
def test_a_body_that_is_no_error_object_is_quoted(body):
    assert isinstance(wire.words_of(body), str)


def test_long_words_are_cut():
    assert len(wire.words_of(b"x" * 10_000)) < 700


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, RequestRejected),
        (401, RequestRejected),
        (403, RequestRejected),
        (404, RequestRejected),
        (422, RequestRejected),
        (408, ServerBusy),
        (425, ServerBusy),
        (429, ServerBusy),
        (503, ServerBusy),
        (500, ServerError),
        (502, ServerError),
        (504, ServerError),
        (302, ServerError),
    ],
)
def test_statuses_are_classified_once(status, kind):
    error = wire.error_of("POST x", status, "why")

    assert type(error) is kind
    assert str(error) == f"POST x: answered {status}: why"


@pytest.mark.parametrize(
    ("value", "seconds"), [("3", 3.0), ("0.5", 0.5), ("soon", None), ("-1", None), ("inf", None), (None, None)]
)
def test_retry_after_is_read_in_seconds(value, seconds):
    assert wire.error_of("x", 503, "", retry_after=value).retry_after == seconds


# --- requests


def test_a_request_says_what_it_must():
    sampling = SamplingParams(max_new_tokens=9, stop=["a"], stop_token_ids=[2], sampling_seed=5, extra={"regex": "x"})
    body = json.loads(
        request(np.array([1, 2]), sampling=sampling, extra={"lora_path": "y", "ids": np.arange(2)}).body(RID)
    )

    assert body["rid"] == RID
    assert body["input_ids"] == [1, 2]
    assert body["return_logprob"] is True
    assert body["stream"] is False
    assert (body["lora_path"], body["ids"]) == ("y", [0, 1])
    params = body["sampling_params"]
    assert (params["max_new_tokens"], params["stop"], params["stop_token_ids"]) == (9, ["a"], [2])
    assert (params["sampling_seed"], params["regex"], params["top_k"]) == (5, "x", -1)


def test_requests_are_encoded_afresh_when_anything_changes():
    """The part of a request after the prompt is remembered: never for other parameters, for an extra, or for a stream."""
    encoder = wire.RequestEncoder(None)
    one, two = SamplingParams(temperature=0.5), SamplingParams(temperature=0.25)
    bodies = [
        json.loads(encoder.encode([1], sampling, extra, stream=stream).body(RID))
        for sampling, extra, stream in [
            (one, {}, False),
            (one, {"x": 1}, False),
            (one, {}, True),
            (two, {}, True),
            (one, {}, False),
        ]
    ]

    assert [body["sampling_params"]["temperature"] for body in bodies] == [0.5, 0.5, 0.5, 0.25, 0.5]
    assert [body["stream"] for body in bodies] == [False, False, True, True, False]
    assert [body.get("x") for body in bodies] == [None, 1, None, None, None]


def test_a_prompt_that_may_change_is_encoded_every_time():
    """Only an array that cannot be written to is taken for the same one again."""
    encoder, sampling = wire.RequestEncoder(None), SamplingParams()

    def ids_sent(ids, sampling=sampling):
        return json.loads(encoder.encode(ids, sampling, {}).body(RID))["input_ids"]

    frozen = id_array([1, 2])
    assert ids_sent(frozen) == ids_sent(frozen) == ids_sent(frozen, SamplingParams(top_k=5)) == [1, 2]
    writable = np.array([1, 2], np.int32)
    assert ids_sent(writable) == [1, 2]
    for changing in ([1, 2], np.array([1, 2])):
        assert ids_sent(changing) == [1, 2]
        changing[0] = 5
        assert ids_sent(changing) == [5, 2]


def test_arrays_that_were_asked_for_are_extras():
    """Packed ones get a row for every token but the last: 3 of the prompt and 3 of the output make 5."""
    experts = np.arange(20, dtype="<i4")
    meta = {
        "routed_experts": base64.b64encode(experts.tobytes()).decode(),
        "input_token_logprobs": [[None, 1, None], [-0.5, 2, None], [-0.25, 3, "x"]],
        "top_p_token_ids": [4, 5, 6],
        "indexer_topk": None,
    }
    turn = decode(answer(meta=meta))

    assert turn.extras["routed_experts"].tolist() == experts.reshape(5, 4).tolist()
    assert np.array_equal(turn.extras["prompt_log_probs"], [np.nan, -0.5, -0.25], equal_nan=True)
    assert turn.extras["top_p_token_ids"].tolist() == [4, 5, 6]
    assert set(turn.extras) == {"routed_experts", "prompt_log_probs", "top_p_token_ids"}
    assert not any(array.flags.writeable for array in turn.extras.values())
    assert not set(meta) & set(turn.meta_info)
    assert set(segments_of([turn])[0].extras) == set(turn.extras)


@pytest.mark.parametrize(
    "meta",
    [{"routed_experts": "%%"}, {"input_token_logprobs": [1]}, {"top_p_token_ids": ["x"]}, {"routed_experts": "AAA="}],
)
def test_an_extra_that_cannot_be_decoded_is_named(meta):
    with pytest.raises(ServerError, match=next(iter(meta))):
        decode(answer(meta=meta))


META = {
    "all_log_probs": [[-0.5, 2, None], [-0.25, 3, "x"]],
    "output_top_logprobs": [[[-0.5, 2, None]], None],
    "hidden_states": [[0.5, 1.0], [0.25, 2.0]],
    "numbers": [1, 2.5, None, True, "x", {"y": [1]}],
    "nothing": [],
    "nested": {"a": [[1, 2]]},
}


@pytest.mark.parametrize("names", [[name] for name in META] + [list(META)], ids=str)
def test_the_rest_of_the_servers_record_is_kept_as_it_is(names):
    """Arrays that look like log-probs are not taken for any."""
    meta = {name: META[name] for name in names}
    turn = decode(answer(meta=meta))

    assert {name: turn.meta_info[name] for name in names} == meta
    assert turn.log_probs.tolist() == [-1.0, -2.5, -0.25]


def test_text_asks_for_the_ids_it_became():
    body = json.loads(request('say "hi"').body(RID))

    assert (body["text"], body["return_prompt_token_ids"]) == ('say "hi"', True)
    assert "input_ids" not in body


@pytest.mark.parametrize(
    ("model_input", "words"),
    [
        ([1, 50, 3], r"input_ids\[1\]: got 50, allowed: 0 to below the vocabulary's size 50"),
        ([-1], "-1"),
        (np.array([3, -7], np.int32), "-7"),
        ([2**31], str(2**31)),
        ([0.5], "integers"),
        ([[1, 2]], "flat"),
        ([], "empty"),
        ("", "empty"),
    ],
)
def test_prompts_that_would_kill_a_server_are_refused_before_sending(model_input, words):
    with pytest.raises(RequestRejected, match=words):
        request(model_input, vocab_size=50)


@pytest.mark.parametrize("extra", [{"rid": "x"}, {"stream": True}, {"input_ids": [1]}, {"sampling_params": {}}])
def test_extras_that_belong_to_the_client_are_refused(extra):
    with pytest.raises(RequestRejected, match=next(iter(extra))):
        request(extra=extra)


def test_several_answers_to_one_request_are_refused():
    with pytest.raises(SettingsError, match=r"extra\['n'\]: got 2"):
        SamplingParams(extra={"n": 2})


def test_what_json_cannot_say_is_refused():
    with pytest.raises(RequestRejected, match="JSON"):
        request(extra={"image_data": object()})


# --- control


def test_the_load_is_that_of_all_ranks():
    loads = [{"num_running_reqs": 2, "num_waiting_reqs": 1}, {"num_running_reqs": 0, "num_waiting_reqs": 4}]
    assert wire.decode_load("x", json.dumps({"loads": loads}).encode()) == 7


@pytest.mark.parametrize("body", [b"", b"[]", b'{"loads": [1]}', b'{"loads": [{}]}'])
def test_a_load_that_is_none_is_an_error(body):
    with pytest.raises(ServerError):
        wire.decode_load("GET x", body)


def test_a_routers_workers_in_both_shapes():
    new = {"workers": [{"url": "http://a:1"}, {"url": "http://b:1@0"}, {"url": "http://b:1@1"}]}

    assert wire.decode_workers("x", json.dumps(new).encode()) == ("http://a:1", "http://b:1")
    assert wire.decode_workers("x", b'{"urls": ["http://a:1"]}') == ("http://a:1",)
    with pytest.raises(ServerError):
        wire.decode_workers("x", b'{"workers": [3]}')


@pytest.mark.parametrize(
    ("status", "text", "done"),
    [
        (200, "Cache flushed.\nPlease check", True),
        (200, "", True),
        (400, "Cache flushed", False),
        (200, "Flush cache failed.", False),
    ],
)
def test_a_flush_succeeded_only_if_status_and_text_say_so(status, text, done):
    assert wire.flushed(status, text) is done


@pytest.mark.parametrize("mode", PauseMode)
def test_f056_the_pause_mode_is_always_said(mode):
    assert wire.pause_body(mode) == {"mode": mode.value}


def test_model_info_that_is_none_says_so():
    with pytest.raises(ServerError, match="does not speak SGLang"):
        wire.decode_model_info("GET x", b'{"hello": "world"}')
    with pytest.raises(ServerError, match="not JSON"):
        wire.decode_model_info("GET x", b"<html>")
    with pytest.raises(ServerError, match="not JSON"):
        wire.decode_model_info("GET x", b'{"x":' * 5000 + b"1" + b"}" * 5000)


@pytest.mark.parametrize("name", ["cached_tokens", "queue_time", "e2e_latency"])
@pytest.mark.parametrize("value", ["9" * 400, "-" + "9" * 400])
def test_a_record_of_a_number_that_no_float_can_hold_counts_as_not_said(name, value):
    body = json.dumps(answer(meta={name: 1})).replace(f'"{name}": 1', f'"{name}": {value}').encode()

    turn = decode(body)

    assert turn.output_ids.tolist() == [7, 8, 9]
    assert (turn.cached_tokens, turn.queue_s, turn.latency_s) == {
        "cached_tokens": (0, 0.5, 2.0),
        "queue_time": (1, None, 2.0),
        "e2e_latency": (1, 0.5, None),
    }[name]


@pytest.mark.parametrize("value", [-1e39, 3.5e38, -1e308])
def test_a_log_prob_that_is_no_float32_is_refused(value):
    with pytest.raises(ServerError, match=r"output_token_logprobs\[1\] is .*e\+?\d+, which is not a float32"):
        decode(answer(meta={"output_token_logprobs": [[-1.0, 7], [value, 8], [-0.25, 9]]}))


def test_a_span_of_versions_that_begins_beyond_every_number_is_refused():
    spans = [{"version": "3", "start": 0, "end": float("1e300")}]
    assert decode(answer(meta={"weight_versions": spans})).versions == ((0, 3, 3),)
    body = json.dumps(answer(meta={"weight_versions": spans})).replace("1e+300", "1e400").encode()
    with pytest.raises(ServerError):
        decode(body)


def test_a_prompt_that_other_code_can_change_is_encoded_anew():
    """A view that cannot be written through, of memory that can: what was checked and encoded once is not what is there now."""
    memory = np.array([1, 2, 3], np.int32)
    view = memory[:]
    view.flags.writeable = False
    encoder = wire.RequestEncoder(100)
    first = encoder.encode(view, SamplingParams(), {})
    memory[0] = 9

    assert first.prompt_ids.tolist() == [1, 2, 3]
    assert b"[9,2,3]" in encoder.encode(view, SamplingParams(), {}).body(RID)
    memory[0] = 5000
    with pytest.raises(RequestRejected, match="5000"):
        encoder.checked(view)

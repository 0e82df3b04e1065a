"""The C extension may refuse an answer, but what it takes it reads as the pure decoder does, to the bit."""

import json
import sys

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trio_rollout import SamplingParams
from trio_rollout._core.arrays import ID_MAX
from trio_rollout.sglang import _wire as wire
from trio_rollout.sglang._wire import decoding

from .helpers import Asked

RID = "0123456789abcdef" * 2
REQUEST = wire.RequestEncoder(None).encode((1, 2, 3), SamplingParams(), {})
ASKED = Asked(attempted="POST x", rid=RID, request=REQUEST, version_of=lambda name: len(str(name)))
CUT = decoding.cut

needs_extension = pytest.mark.skipif(CUT is None, reason="the C extension is not compiled")


def test_the_extension_is_compiled():
    """Users may do without a compiler; developers of this project have one, and test the extension."""
    assert CUT is not None, "run make setup: trio_rollout/sglang/_wire/_triples.c was not compiled"


def outcome(body, cut):
    """Everything that can be said about the Turn of an answer, or about its error."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoding, "cut", cut)
        try:
            turn = wire.decode_turn(body, ASKED)
        except Exception as error:  # noqa: BLE001  any two must be the same
            return type(error), str(error)
    arrays = [(array.dtype, array.tobytes(), array.flags.writeable) for array in (turn.output_ids, turn.log_probs)]
    rest = (turn.stop, turn.text, turn.versions, turn.weight_version, turn.cached_tokens, turn.queue_s, turn.latency_s)
    return *arrays, repr(rest), repr(turn.meta_info), repr(turn.extras)


def body_of(triples, ids=None, *, meta="", top=""):
    """An answer, out of JSON texts."""
    ids = "null" if ids is None else f"[{','.join(ids)}]"
    return (
        f'{{"text":"a\\"]}}é","output_ids":{ids},"meta_info":{{"id":"{RID}","finish_reason":{{"type":"stop"}},{meta}'
        f'"output_token_logprobs":[{",".join(triples)}],"completion_tokens":{len(triples)}}}{top}}}'
    ).encode()


def floats(log_probs):
    """Return the extension's float32 of these numbers, or None if it refuses them."""
    found = CUT(body_of([f"[{number},1,null]" for number in log_probs]))
    return None if found is None else np.frombuffer(found[1], np.float32)


def same_bits(array, texts):
    return array.tobytes() == np.array([float(text) for text in texts], np.float32).tobytes()


# --- what is taken, and what is refused


@needs_extension
@pytest.mark.parametrize("separators", [None, (",", ":")], ids=["spaced", "compact"])
@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview], ids=lambda kind: kind.__name__)
def test_the_usual_answer_is_cut(separators, kind):
    value = {
        "text": 'a "quoted" \\ [text]',
        "output_ids": [7, 0, ID_MAX],
        "meta_info": {
            "x": [[1, 2], {"y": "]}"}],
            "output_token_logprobs": [[-1.5, 7, None], [-0.0, 0, '["\\'], [-2, ID_MAX]],
        },
        "prompt_token_ids": [1],
    }
    rest, log_probs, ids = CUT(kind(json.dumps(value, separators=separators).encode()))

    assert np.frombuffer(ids, np.int32).tolist() == value["output_ids"]
    assert log_probs == np.array([-1.5, -0.0, -2], np.float32).tobytes()
    value["output_ids"] = value["meta_info"]["output_token_logprobs"] = None
    assert json.loads(rest) == value


REFUSED = {
    "an id beyond 31 bits": body_of(["[-1,2147483648,null]"]),
    "a negative id": body_of(["[-1,-1,null]"]),
    "an id with a fraction": body_of(["[-1,1.0,null]"]),
    "an id of zeros": body_of(["[-1,00,null]"]),
    "other ids": body_of(["[-1,1,null]"], ["2"]),
    "more ids": body_of(["[-1,1,null]"], ["1", "1"]),
    "fewer ids": body_of(["[-1,1,null]", "[-1,1,null]"], ["1"]),
    "more ids than there is room for": body_of(["[-1,1,null]"] * 256, ["1"] * 257),
    "something behind the ids": body_of(["[-1,1,null]"], ["1"]).replace(b":[1],", b":[1]x,"),
    "something behind null": body_of(["[-1,1,null]"]).replace(b":null,", b":nullx,"),
    "another name than null": body_of(["[-1,1,null]"]).replace(b":null,", b":nill,"),
    "no log-prob": body_of(["[null,1,null]"]),
    "NaN": body_of(["[NaN,1,null]"]),
    "four elements": body_of(["[-1,1,null,null]"]),
    "a third that is a list": body_of(["[-1,1,[]]"]),
    "a third with an odd escape": body_of(['[-1,1,"\\x"]']),
    "a third with a line's end": body_of(['[-1,1,"\n"]']),
    "one element": body_of(["[-1]"]),
    "no triple": body_of(["-1"]),
    "a comma too many": body_of(["[-1,1,null],"]),
    "no tokens": body_of([]),
    "log-probs twice": body_of(["[-1,1]"], meta='"output_token_logprobs":[[-2,2]],'),
    "log-probs under an escaped name": body_of(["[-1,1]"], meta='"output_token_logprob\\u0073":null,'),
    "ids twice": body_of(["[-1,1]"], ["2"], top=',"output_ids":[1]'),
    "a record twice": body_of(["[-1,1]"], top=',"meta_info":{"x":1}'),
    "nothing": b"",
    "a list": b"[]",
    "an empty object": b"{}",
}


@needs_extension
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_usual_is_left_to_the_pure_decoder(name):
    assert CUT(REFUSED[name]) is None
    assert outcome(REFUSED[name], CUT) == outcome(REFUSED[name], None)


@needs_extension
def test_an_answer_that_is_cut_short_is_refused_whatever_stands_behind_it_in_memory():
    body = memoryview(body_of(["[-1.25e-05,12345,null]", '[-0.1234567890123456,7,"x\\n"]'], ["12345", "7"]))

    assert CUT(body) is not None
    assert not [end for end in range(len(body)) if CUT(body[:end]) is not None]


@needs_extension
def test_what_is_left_and_damaged_is_told_as_it_is():
    for body in (
        body_of(["[-1,1]"], meta='"x":tru,'),
        body_of(["[-1,1]"], top=',"text":5'),
        body_of(["[-1,1]"]) + b"}",
    ):
        assert CUT(body) is not None
        assert outcome(body, CUT) == outcome(body, None)


# --- numbers

NUMBERS = [
    "0", "0.0", "-0.0", "-0", "0e1", "-0e1", "0e999", "1e5", "1E+2", "-1.5e-3", "1e22", "1e23", "1e-22", "1e-23", "1e38",
    "3.4028234663852886e38", "3.4028235677973366e38", "3.5e38", "1e400", "-1e400", "1e-400", "1.1754943508222875e-38",
    "1.17549421069244e-38", "1e-45", "7e-46", "9007199254740993", "18446744073709551615", "18446744073709551616",
    "12345678901234567890123", "0.1234567890123456789012345", "0." + "0" * 30 + "1", "0." + "0" * 90 + "1", "1" * 400,
    "1e0000000001", "1e-99999999999", "1e4294967296", "-1e-4294967296", "01", "1.", ".5", "+1", "1e", "1e+", "-", "--1", "- 1", "1 2", "0x1", "Infinity", "true",
]  # fmt: skip


@needs_extension
@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_every_form_of_a_number_is_the_same_to_both(number):
    body = body_of([f"[{number},1,null]"])
    assert outcome(body, CUT) == outcome(body, None)


@needs_extension
@pytest.mark.parametrize("scale", [1, 1e-3, 1e-12, 1e-30, 1e30])
def test_numbers_that_were_floats_or_doubles_are_read_to_the_bit(scale):
    """100,000 in all, with 1 to 17 digits; none of these happens to lie by a midpoint."""
    rng = np.random.default_rng(4)
    doubles = -rng.exponential(scale, 10_000)
    for values in (doubles, doubles.astype(np.float32).astype(float)):
        texts = [repr(float(value)) for value in values]
        assert same_bits(floats(texts), texts)


@needs_extension
@given(
    st.floats(min_value=2.0**-125, max_value=2.0**120, width=32),
    st.integers(-40, 40),
    st.integers(15, 25),
    st.booleans(),
)
@example(below=1.0, places=0, digits=17, negative=True)
def test_numbers_between_two_floats_are_read_to_the_bit_or_refused(below, places, digits, negative):
    """Around the middle, where the last digit decides which of the two it is."""
    middle = (float(below) + float(np.nextafter(np.float32(below), np.float32(np.inf)))) / 2
    value = middle + places * float(np.spacing(middle))
    text = f"{-value if negative else value:.{digits}e}"
    found = floats([text])

    assert found is None or same_bits(found, [text])
    if abs(places) > 24 and 16 <= digits < 18:
        assert found is not None


@needs_extension
def test_the_middle_between_two_floats_is_refused():
    """As it is printed, and with all its digits; and so is what is no normal float, where the middles are others."""
    for text in (repr(1 + 2**-24), "1.000000059604644775", repr(3 * 2**-150), "1e-40", "3.4500000000000001e38"):
        assert floats([text]) is None
        assert same_bits(floats(["1.5"]), ["1.5"])


@needs_extension
def test_middles_are_read_to_the_bit_or_refused_whatever_their_size():
    """Of doubles that are one, half are read as their neighbours if the scaling is off by one last place."""
    rng = np.random.default_rng(6)
    for exponent in range(-149, 120, 7):
        for half in (2 * rng.integers(2**20, 2**24, 20) + 1).tolist():
            middle = half * 2.0 ** (exponent - 1)
            for text in (repr(middle), repr(float(np.nextafter(middle, 0))), repr(float(np.nextafter(middle, 1e39)))):
                found = floats([text])
                assert found is None or same_bits(found, [text]), text


# --- anything at all

number = st.one_of(
    st.sampled_from(NUMBERS),
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.floats(-30, 0, width=32).map(repr),
    st.integers(-(10**21), 10**21).map(str),
    st.from_regex(r"-?[0-9]{1,3}(\.[0-9]{1,25})?([eE][+-]?[0-9]{1,2})?", fullmatch=True),
)
plain = st.floats(-30, 0, width=32).map(repr)
token = st.integers(0, ID_MAX).map(str)
odd_token = st.sampled_from(["-1", "-0", str(2**31), str(2**63), str(10**30), "1.0", "1e3", "null", '"1"', "007", ""])
third = st.one_of(
    st.sampled_from([",null", ""]), st.text(max_size=5).map(lambda text: "," + json.dumps(text, ensure_ascii=False))
)
odd_third = st.sampled_from([
    ",5",
    ",[]",
    ",null,1",
    ',"\\u0041"',
    ',"\\ud800"',
    ',"\\q"',
    ',"',
    ",nul",
    ",",
    ',"\x00"',
])
MEMBERS = [
    "", '"x":[[1,2]],', '"x":{"output_token_logprobs":[[1,2]]},', '"weight_version":"7",', '"x":"\\\\\\"[",',
    '"cached_tokens":5,"queue_time":-0,', '"big":123456789012345678901234567890,', '"output_ids":[9],', '"x":1e999,',
    '"output_token_logprobs":null,', '"\\u006futput_token_logprobs":[[-1,5]],', '"meta_info":{},', '"hidden":[[0.5,1],[]],',
]  # fmt: skip
TOPS = [
    "",
    ',"prompt_token_ids":[1,2]',
    ',"x":[{}]',
    ',"output_ids":null',
    ',"output\\u005fids":[3]',
    ',"meta_info":{}',
    "}",
]


@st.composite
def answers(draw):
    """Usual ones, and such with something odd in one place or another."""
    odd = draw(st.sampled_from([None, None, "number", "id", "third", "ids", "around"]))
    numbers, ids, thirds = [], [], []
    for _ in range(draw(st.integers(0 if odd else 1, 4))):
        numbers.append(draw(number if odd == "number" else plain))
        ids.append(draw(odd_token if odd == "id" and draw(st.booleans()) else token))
        thirds.append(draw(odd_third if odd == "third" and draw(st.booleans()) else third))
    triples = [f"[{one},{two}{three}]" for one, two, three in zip(numbers, ids, thirds, strict=True)]
    listed = draw(st.sampled_from([ids[1:], ids[::-1], [*ids, "1"]] if odd == "ids" else [ids, None]))
    meta, top = (draw(st.sampled_from(MEMBERS)), draw(st.sampled_from(TOPS))) if odd == "around" else (MEMBERS[-1], "")
    body = body_of(triples, listed, meta=meta, top=top)
    if draw(st.booleans()):
        space = draw(st.sampled_from([b" ", b"\n\t", b"\r"]))
        for mark in draw(st.sets(st.sampled_from([b"[", b"]", b",", b":", b"{", b"}"]))):
            body = body.replace(mark, draw(st.sampled_from([space + mark, mark + space])))
    return body


@st.composite
def damaged(draw):
    body = bytearray(draw(answers()))
    for _ in range(draw(st.integers(1, 2))):
        at = draw(st.integers(0, len(body) - 1))
        what = draw(st.sampled_from(["drop", "repeat", "replace", "cut"]))
        if what == "drop":
            del body[at : at + draw(st.integers(1, 4))]
        elif what == "repeat":
            body[at:at] = body[at : at + draw(st.integers(1, 8))]
        elif what == "replace":
            body[at] = draw(st.sampled_from(b'[]{},:"\\-+.e0159nu \n\x00\x80\xff') | st.integers(0, 255))
        else:
            del body[at:]
        if not body:
            break
    return bytes(body)


@needs_extension
@settings(max_examples=400)
@given(st.one_of(answers(), damaged()))
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_both_decoders_make_the_same_of_any_answer(body):
    exact = np.frombuffer(body, np.uint8).copy()  # nothing stands behind it
    assert outcome(memoryview(exact), CUT) == outcome(body, None)


@needs_extension
def test_large_answers_are_the_same_too():
    """Those are read without the interpreter lock."""
    rng = np.random.default_rng(8)
    triples = [f"[{-value!r},{token},null]" for value, token in enumerate(rng.integers(0, ID_MAX, 8000).tolist(), 1)]
    body = body_of(triples)

    assert len(body) > 64 * 1024
    assert CUT(body) is not None
    assert outcome(body, CUT) == outcome(body, None)


@needs_extension
def test_nothing_is_kept():
    """Neither of an answer that is taken nor of one that is refused at its end."""
    body = body_of([f"[-1.5,{token},null]" for token in range(500)])
    before = sys.getrefcount(body)
    for _ in range(3):
        CUT(body)
        CUT(body[:-1])
    assert sys.getrefcount(body) == before

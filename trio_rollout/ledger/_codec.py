"""Values of the engine as msgpack, and back: prompts, groups, recorded turns, failures, user data.

Arrays are stored as their bytes, 4 a token. Every value comes back equal to itself (tuples in user data: as lists).

User data are the labels, metadata and extras that users attach. JSON values are stored as they are, and so are integers of
any size, lone surrogates (models produce them), numpy numbers (as Python numbers) and numeric arrays. Anything else is
refused with the path to it (docs/decisions/0008-what-the-ledger-is-made-of.md).
"""

import zlib
from collections.abc import Callable, Mapping, Sequence
from itertools import starmap
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from .._core.enums import Cause, Status, Stop
from .._core.samples import SampleCounts
from .._core.sampling import SamplingParams
from .._core.turn_log import RecordedTurn
from .._core.values import Failure, Group, GroupId, MissingSample, Prompt, Segment, Trajectory, Turn, VersionSpan
from ..errors import DataRefused, LedgerError

_CRC = 4  # bytes of a checksum


def encode_prompt(prompt: Prompt) -> bytes:
    """Encode a prompt.

    Raises:
      DataRefused: names the prompt and the part of it that can't be stored.
    """
    return _encoded(f"prompt {prompt.group_id}", _prompt, prompt, group=prompt.group_id)


def decode_prompt(data: bytes | memoryview) -> Prompt:
    """Decode the result of ``encode_prompt``."""
    return _prompt_from(unpacked(data))


def encode_group(group: Group) -> bytes:
    """Encode a group.

    Raises:
      DataRefused: names the group, the trajectory and the key that can't be stored.
    """
    return _encoded(f"group {group.id}", _group, group, group=group.id)


def decode_group(data: bytes | memoryview) -> Group:
    """Decode the result of ``encode_group``: an equal group, with read-only arrays."""
    stored = unpacked(data)
    prompt = _prompt_from(stored["prompt"])
    return Group(
        id=GroupId(*stored["id"]),
        attempt=stored["attempt"],
        prompt=prompt,
        trajectories=tuple(_trajectory_from(row, prompt) for row in stored["trajectories"]),
        missing=[
            MissingSample(index=index, failure=_failure_from(failure)) for index, failure in stored.get("missing", ())
        ],
    )


def encode_sample(gid: GroupId, trajectory: Trajectory) -> bytes:
    """Encode a trajectory of this group without its prompt.

    Raises:
      DataRefused: names the group, the sample and the key that can't be stored.
    """

    def encode(row: Trajectory) -> object:
        return _trajectory(row, None)

    return _encoded(f"sample {trajectory.index} of group {gid}", encode, trajectory, group=gid)


def decode_sample(data: bytes | memoryview, prompt: Prompt) -> Trajectory:
    """Decode the result of ``encode_sample``; ``prompt`` is the group's. The arrays are read-only."""
    return _trajectory_from(unpacked(data), prompt)


def encode_turn(gid: GroupId, index: int, record: RecordedTurn) -> bytes:
    """Encode a recorded turn of this sample, behind a checksum.

    Raises:
      DataRefused: names the group, the sample and the part that can't be stored.
    """
    what = f"turn {record.number} of sample {index} of group {gid}"
    data = _encoded(what, _turn, record, group=gid)
    return zlib.crc32(data).to_bytes(_CRC, "little") + data


def decode_turn(data: bytes | memoryview) -> RecordedTurn:
    """Decode the result of ``encode_turn``. The arrays are read-only.

    Raises:
      LedgerError: the bytes are not those that were encoded.
    """
    body = memoryview(data)[_CRC:]
    if not body or zlib.crc32(body) != int.from_bytes(data[:_CRC], "little"):
        raise LedgerError("a recorded turn is damaged: it fails its checksum")
    return _turn_from(unpacked(body))


def encode_counts(counts: Sequence[SampleCounts]) -> bytes | None:
    """Encode the tries of each sample; None for none."""
    return packed([(each.attempts, each.unpenalized, each.tries) for each in counts]) if counts else None


def decode_counts(data: bytes | None) -> tuple[SampleCounts, ...]:
    """Decode the result of ``encode_counts``."""
    return () if data is None else tuple(starmap(SampleCounts, unpacked(data)))


def encode_wasted(wasted: Mapping[Cause, int]) -> bytes | None:
    """Encode tokens by cause; None for none."""
    return packed({cause.value: tokens for cause, tokens in wasted.items() if tokens}) if wasted else None


def decode_wasted(data: bytes | None) -> dict[Cause, int]:
    """Decode the result of ``encode_wasted``."""
    return {} if data is None else {Cause(cause): tokens for cause, tokens in unpacked(data).items()}


def prompt_of_group(data: bytes | memoryview) -> bytes:
    """Return the encoded prompt of an encoded group."""
    return encode_prompt(_prompt_from(unpacked(data)["prompt"]))


def encode_failure(failure: Failure) -> bytes:
    """Encode a failure."""
    return _encoded("a failure", _failure, failure)


def decode_failure(data: bytes) -> Failure:
    """Decode the result of ``encode_failure``."""
    return _failure_from(unpacked(data))


def encode_data(what: str, value: Mapping[str, object] | list[Any]) -> bytes:
    """Encode user data (a source's state, rewards); ``what`` names it in an error.

    Raises:
      DataRefused: names the part that can't be stored.
    """
    return _encoded(what, plain, value)


def _named(field: str, encode: Callable[[Any], object], value: object) -> object:
    try:
        return encode(value)
    except UnencodableError as error:
        error.path.insert(0, field)
        raise


def _raw(value: npt.NDArray[Any], dtype: str) -> memoryview:
    """Return the array's bytes without a copy: copying would be most of the cost of encoding a group."""
    return np.ascontiguousarray(value, dtype).data


def _sampling(params: SamplingParams) -> dict[str, object]:
    return {
        "max_new_tokens": params.max_new_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "stop": [text(item) for item in params.stop],
        "stop_token_ids": list(params.stop_token_ids),
        "ignore_eos": params.ignore_eos,
        "skip_special_tokens": params.skip_special_tokens,
        "sampling_seed": _named("sampling_seed", plain, params.sampling_seed),
        "extra": _named("sampling.extra", plain, params.extra),
    }


def _prompt(prompt: Prompt) -> dict[str, object]:
    ids = prompt.input_ids
    return {
        "id": text(prompt.id),
        "epoch": prompt.epoch,
        "input_ids": None if ids is None else _raw(ids, "<i4"),
        "text": None if prompt.text is None else text(prompt.text),
        "messages": _named("messages", plain, prompt.messages),
        "label": _named("label", plain, prompt.label),
        "metadata": _named("metadata", plain, prompt.metadata),
        "extra": _named("extra", plain, prompt.extra),
        "sampling": None if prompt.sampling is None else _sampling(prompt.sampling),
        **({"tools": _named("tools", plain, prompt.tools)} if prompt.tools else {}),  # older versions know no tools
    }


def _prompt_from(stored: dict[str, Any]) -> Prompt:
    ids, sampling = stored.pop("input_ids"), stored.pop("sampling")
    return Prompt(
        input_ids=None if ids is None else np.frombuffer(ids, "<i4"),
        sampling=None if sampling is None else SamplingParams(**sampling),
        **stored,
    )


def _failure(failure: Failure) -> dict[str, object]:
    return {
        "cause": failure.cause.value,
        "type": text(failure.type),
        "message": text(failure.message),
        "traceback": text(failure.traceback),
        "group": None if failure.group is None else [failure.group.epoch, text(failure.group.prompt)],
        "attempt": failure.attempt,
    }


def _failure_from(stored: dict[str, Any]) -> Failure:
    cause, group = Cause(stored.pop("cause")), stored.pop("group")
    return Failure(cause=cause, group=None if group is None else GroupId(*group), **stored)


def _arrays(extras: Mapping[str, npt.NDArray[Any]]) -> dict[str, object]:
    return {name: _named(f"extras[{name!r}]", array, np.asarray(value)) for name, value in extras.items()}


def _segment(segment: Segment) -> dict[str, object]:
    return {
        "tokens": _raw(segment.tokens, "<i4"),
        "response_length": segment.response_length,
        "loss_mask": _raw(segment.loss_mask, "u1"),
        "log_probs": _raw(segment.log_probs, "<f4"),
        "versions": [list(span) for span in segment.versions],
        "text": text(segment.text),
        "extras": _arrays(segment.extras),
    }


def _segment_from(stored: dict[str, Any]) -> Segment:
    return Segment(
        tokens=np.frombuffer(stored["tokens"], "<i4"),
        response_length=stored["response_length"],
        loss_mask=np.frombuffer(stored["loss_mask"], "u1"),
        log_probs=np.frombuffer(stored["log_probs"], "<f4"),
        versions=tuple(starmap(VersionSpan, stored["versions"])),
        text=stored["text"],
        extras={name: array_from(value) for name, value in stored["extras"].items()},
    )


def _trajectory(row: Trajectory, prompt: dict[str, object] | None) -> dict[str, object]:
    """Return the trajectory with this prompt; None stands for the group's."""
    return {
        "prompt": prompt,
        "index": row.index,
        "segments": [_named(f"segments[{place}].", _segment, segment) for place, segment in enumerate(row.segments)],
        "status": row.status.value,
        "stop": row.stop.value,
        "reward": _named("reward", plain, row.reward),
        "turns": row.turns,
        "metadata": _named("metadata", plain, row.metadata),
        "error": None if row.error is None else _failure(row.error),
    }


def _trajectory_from(stored: dict[str, Any], prompt: Prompt) -> Trajectory:
    own, error = stored.pop("prompt"), stored.pop("error")
    return Trajectory(
        prompt=prompt if own is None else _prompt_from(own),
        segments=tuple(map(_segment_from, stored.pop("segments"))),
        status=Status(stored.pop("status")),
        stop=Stop(stored.pop("stop")),
        error=None if error is None else _failure_from(error),
        **stored,
    )


def _turn(record: RecordedTurn) -> dict[str, object]:
    turn = record.turn
    return {
        "number": record.number,
        "request": record.request,
        "beside": record.beside,
        "rid": text(turn.rid),
        "prompt_ids": _raw(turn.prompt_ids, "<i4"),
        "output_ids": _raw(turn.output_ids, "<i4"),
        "log_probs": _raw(turn.log_probs, "<f4"),
        "text": text(turn.text),
        "stop": turn.stop.value,
        "weight_version": turn.weight_version,
        "versions": [list(span) for span in turn.versions],
        "cached_tokens": turn.cached_tokens,
        "queue_s": turn.queue_s,
        "latency_s": turn.latency_s,
        "meta_info": _named("meta_info", plain, turn.meta_info),
        "extras": _arrays(turn.extras),
    }


def _turn_from(stored: dict[str, Any]) -> RecordedTurn:
    number, request, beside = (stored.pop(name) for name in ("number", "request", "beside"))
    turn = Turn(
        prompt_ids=np.frombuffer(stored.pop("prompt_ids"), "<i4"),
        output_ids=np.frombuffer(stored.pop("output_ids"), "<i4"),
        log_probs=np.frombuffer(stored.pop("log_probs"), "<f4"),
        stop=Stop(stored.pop("stop")),
        versions=tuple(starmap(VersionSpan, stored.pop("versions"))),
        extras={name: array_from(value) for name, value in stored.pop("extras").items()},
        **stored,
    )
    return RecordedTurn(number=number, request=request, beside=beside, turn=turn)


def _group(group: Group) -> dict[str, object]:
    prompt = _prompt(group.prompt)

    def encode(row: Trajectory) -> object:
        own = prompt if row.prompt is group.prompt else _prompt(row.prompt)
        return _trajectory(row, None if own is prompt or packed(own) == packed(prompt) else own)

    rows = [_named(f"trajectories[{place}].", encode, row) for place, row in enumerate(group.trajectories)]
    stored: dict[str, object] = {
        "prompt": prompt,
        "id": [group.id.epoch, text(group.id.prompt)],
        "attempt": group.attempt,
        "trajectories": rows,
    }
    if group.missing:
        stored["missing"] = [[each.index, _failure(each.failure)] for each in group.missing]
    return stored


def _encoded(what: str, encode: Callable[[Any], object], value: object, *, group: GroupId | None = None) -> bytes:
    try:
        return packed(encode(value))
    except UnencodableError as error:
        raise DataRefused(f"{what} can't be written to the ledger: {error}", group=group) from None
    except (OverflowError, TypeError, ValueError) as error:
        raise DataRefused(f"{what} can't be written to the ledger: {error}", group=group) from error


_DEEPEST = 200  # levels; far above any real data, far below Python's recursion limit
_BIG_INT, _SURROGATES, _ARRAY = 1, 2, 3
_INT64 = range(-(2**63), 2**64)


class UnencodableError(Exception):
    """A value that can't be stored. ``path`` leads to it."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.path: list[str] = []

    def __str__(self) -> str:
        return f"{''.join(self.path)}: {self.args[0]}"


def text(value: str) -> str | msgspec.msgpack.Ext:
    """Return a string as msgpack can hold it, lone surrogates included."""
    if value.isascii():
        return value
    try:
        value.encode()
    except UnicodeEncodeError:
        return msgspec.msgpack.Ext(_SURROGATES, value.encode("utf-8", "surrogatepass"))
    return value


def array(value: npt.NDArray[Any]) -> list[Any]:
    """Return a numeric array as dtype, shape and bytes."""
    if value.dtype.kind not in "biufcmMSU":
        raise UnencodableError(f"an array of dtype {value.dtype} can't be stored, only numbers, times and strings")
    return [value.dtype.str, list(value.shape), value.tobytes()]


def array_from(stored: list[Any]) -> npt.NDArray[Any]:
    """Return the array that ``array`` was given, read-only."""
    dtype, shape, data = stored
    return np.frombuffer(data, np.dtype(dtype)).reshape(shape)


def _number(value: int) -> int | msgspec.msgpack.Ext:
    return int(value) if value in _INT64 else msgspec.msgpack.Ext(_BIG_INT, hex(value).encode())


def _key(key: object) -> object:
    if isinstance(key, str):
        found = text(key)
        if isinstance(found, str):
            return found
    elif key is None or isinstance(key, bool | float) or (isinstance(key, int) and key in _INT64):
        return key
    raise UnencodableError(f"the key {key!r} can't be stored, only valid text and 64-bit numbers")


def _items(value: Mapping[Any, object], depth: int) -> dict[object, object]:
    found: dict[object, object] = {}
    key: object = None
    try:
        for key, inner in value.items():
            found[_key(key)] = plain(inner, depth + 1)
    except UnencodableError as error:
        error.path.insert(0, f"[{key!r}]")
        raise
    return found


def _elements(value: list[Any] | tuple[Any, ...], depth: int) -> list[object]:
    found: list[object] = []
    try:
        for inner in value:
            found.append(plain(inner, depth + 1))  # ruff: ignore[manual-list-comprehension]  the index is needed on failure
    except UnencodableError as error:
        error.path.insert(0, f"[{len(found)}]")
        raise
    return found


def _scalar(value: str | float | np.generic) -> object:
    """Return a scalar as its JSON base type, also from a subclass (string enums, numpy numbers)."""
    match value:
        case str():
            return text("".join(value) if type(value) is not str else value)
        case int():
            return _number(value)
        case float():
            return float(value)
        case _ if value.dtype.kind in "biuf":
            return float(value) if value.dtype.char == "g" else _scalar(value.item())  # g: wider than any in Python
    raise UnencodableError(f"a number of dtype {value.dtype} can't be stored")


def plain(value: object, depth: int = 0) -> object:
    """Return the value as the msgpack encoder takes it.

    Raises:
      UnencodableError: names the part that can't be stored.
    """
    if value is None or isinstance(value, bool):
        return value
    if depth > _DEEPEST:
        raise UnencodableError(f"nested deeper than {_DEEPEST} levels")
    if isinstance(value, str | int | float | np.generic):
        return _scalar(value)
    if isinstance(value, Mapping):
        return _items(value, depth)
    if isinstance(value, list | tuple):
        return _elements(value, depth)
    if isinstance(value, np.ndarray):
        return msgspec.msgpack.Ext(_ARRAY, msgspec.msgpack.encode(array(value)))
    raise UnencodableError(
        f"a value of type {type(value).__qualname__} can't be stored, only JSON values, numpy numbers and arrays"
    )


def _restored(code: int, data: memoryview) -> object:
    match code:
        case 1:
            return int(bytes(data), 16)
        case 2:
            return bytes(data).decode("utf-8", "surrogatepass")
        case 3:
            return array_from(msgspec.msgpack.decode(data))
    raise AssertionError(f"unknown extension type {code}")


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(ext_hook=_restored)


def packed(value: object) -> bytes:
    """Encode plain data as msgpack."""
    return _encoder.encode(value)


def unpacked(data: bytes | memoryview) -> Any:
    """Return the data that ``packed`` was given."""
    return _decoder.decode(data)

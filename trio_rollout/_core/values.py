"""The values that travel: prompt, turn, segment, trajectory, group. Frozen; arrays are read-only numpy.

Shapes: ``P`` prompt tokens, ``R`` response tokens of one segment, ``T = P + R``.

``copied`` copies values that have been checked: ``attrs.evolve`` would check and convert every field again for each rollout.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import attrs
import numpy as np
import numpy.typing as npt

from .arrays import FloatArray, IdArray, MaskArray, brief, float_array, id_array, mask_array
from .enums import Cause, Status, Stop
from .sampling import SamplingParams

_same_array = attrs.cmp_using(eq=np.array_equal)


class GroupId(NamedTuple):
    """Identity of a group: the same prompt in another epoch is another group."""

    epoch: int
    prompt: str

    def __str__(self) -> str:
        return f"{self.epoch}/{self.prompt}"


class VersionSpan(NamedTuple):
    """Tokens ``[start, stop)`` of a response were sampled under weight version ``version``."""

    start: int
    stop: int
    version: int


def _mapping(value: Mapping[str, object]) -> Mapping[str, object]:
    return dict(value)


def _optional_ids(ids: Sequence[int] | npt.NDArray[Any] | None) -> IdArray | None:
    return None if ids is None else id_array(ids)


def _spans(spans: Iterable[VersionSpan]) -> tuple[VersionSpan, ...]:
    return tuple(spans)


def _objects(value: Sequence[Mapping[str, object]]) -> tuple[Mapping[str, object], ...]:
    return tuple(dict(item) for item in value)


def _messages(value: Sequence[Mapping[str, object]] | None) -> tuple[Mapping[str, object], ...] | None:
    return None if value is None else _objects(value)


def _is_text(_: object, field: "attrs.Attribute[str]", value: str) -> None:
    try:
        value.encode()
    except UnicodeEncodeError as error:  # a name that no database and no file can hold
        raise ValueError(f"{field.name} {value!r}: {error}") from None


@attrs.frozen(kw_only=True)
class Prompt:
    """One task for the model: exactly one of ``input_ids``, ``text`` and ``messages``.

    ``id`` is unique within an epoch; ``epoch`` is counted by the source. ``label`` and ``metadata`` are the user's and
    never read by the engine. ``tools``, in OpenAI's form, are for the chat template, so they need ``messages``. ``extra``
    goes into the request as it is (images, a LoRA path, …).

    Raises:
      ValueError, TypeError: none or several of the three inputs are given, the input is empty, an id is no token id, there
        are tools without messages, or the prompt's own id is no text (a lone surrogate).
    """

    id: str = attrs.field(converter=str, validator=_is_text)
    input_ids: IdArray | None = attrs.field(default=None, converter=_optional_ids, eq=_same_array, repr=brief)
    text: str | None = attrs.field(default=None, repr=brief)
    messages: tuple[Mapping[str, object], ...] | None = attrs.field(default=None, converter=_messages, repr=brief)
    label: object = attrs.field(default=None, repr=brief)
    metadata: Mapping[str, object] = attrs.field(factory=dict, converter=_mapping, repr=brief)
    sampling: SamplingParams | None = None
    extra: Mapping[str, object] = attrs.field(factory=dict, converter=_mapping, repr=brief)
    epoch: int = 0
    tools: tuple[Mapping[str, object], ...] = attrs.field(default=(), converter=_objects, repr=brief)

    def __attrs_post_init__(self) -> None:
        given = {
            name: len(value) for name in ("input_ids", "text", "messages") if (value := getattr(self, name)) is not None
        }
        if len(given) != 1:
            raise ValueError(
                f"prompt {self.id!r}: exactly one of input_ids, text, messages is needed, got {list(given)}"
            )
        if not all(given.values()):
            raise ValueError(f"prompt {self.id!r}: {next(iter(given))} is empty")
        if self.tools and self.messages is None:
            raise ValueError(f"prompt {self.id!r}: tools need messages, and it has {next(iter(given))}")

    @property
    def group_id(self) -> GroupId:
        """The id of the group that this prompt becomes."""
        return GroupId(self.epoch, self.id)


@attrs.frozen(kw_only=True)
class Turn:
    """One answer of an inference server.

    ``log_probs`` (R) are the log-probs of ``output_ids`` as the server sampled them: SGLang takes them **after**
    temperature and before top-p and top-k. ``versions`` tile ``[0, R)``; ``weight_version`` is that of the last token.
    ``queue_s`` and ``latency_s`` are seconds; ``meta_info`` is the server's own record without the arrays. ``extras`` are
    arrays that the request asked for, over prompt and output: routed experts, prompt log-probs, …
    """

    rid: str
    prompt_ids: IdArray = attrs.field(converter=id_array, eq=_same_array, repr=brief)
    output_ids: IdArray = attrs.field(converter=id_array, eq=_same_array, repr=brief)
    log_probs: FloatArray = attrs.field(converter=float_array, eq=_same_array, repr=brief)
    text: str = attrs.field(repr=brief)
    stop: Stop
    weight_version: int
    versions: tuple[VersionSpan, ...] = attrs.field(converter=_spans, repr=brief)
    cached_tokens: int = 0
    queue_s: float | None = None
    latency_s: float | None = None
    meta_info: Mapping[str, object] = attrs.field(factory=dict, repr=brief)
    extras: Mapping[str, npt.NDArray[Any]] = attrs.field(factory=dict, eq=False, repr=brief)

    def __attrs_post_init__(self) -> None:
        if len(self.output_ids) != len(self.log_probs):
            raise ValueError(f"turn {self.rid}: {len(self.output_ids)} output ids but {len(self.log_probs)} log-probs")


@attrs.frozen(kw_only=True)
class Segment:
    """One training row: ``tokens`` (T) is prompt and response; the other arrays have ``response_length`` (R) entries.

    ``loss_mask`` is 1 where the model sampled the token and it is to be trained; ``log_probs`` is 0.0 where it is 0.
    ``versions`` are runs of (start, stop, version) over the response; masked tokens belong to no run. ``extras`` are
    named arrays that ride along, as the row's last turn had them: routed experts, top-p ids, prompt log-probs.

    Raises:
      ValueError: the lengths do not agree.
    """

    tokens: IdArray = attrs.field(converter=id_array, eq=_same_array, repr=brief)
    response_length: int
    loss_mask: MaskArray = attrs.field(converter=mask_array, eq=_same_array, repr=brief)
    log_probs: FloatArray = attrs.field(converter=float_array, eq=_same_array, repr=brief)
    versions: tuple[VersionSpan, ...] = attrs.field(converter=_spans, repr=brief)
    text: str = attrs.field(default="", repr=brief)
    extras: Mapping[str, npt.NDArray[Any]] = attrs.field(factory=dict, eq=False, repr=brief)

    def __attrs_post_init__(self) -> None:
        size = self.response_length
        if not 0 <= size <= len(self.tokens):
            raise ValueError(f"segment: response_length {size} of {len(self.tokens)} tokens")
        if len(self.loss_mask) != size:
            raise ValueError(f"segment: loss_mask has {len(self.loss_mask)} entries, the response {size}")
        if len(self.log_probs) != size:
            raise ValueError(f"segment: log_probs has {len(self.log_probs)} entries, the response {size}")


def _id_of(prompt: "Prompt") -> str:
    return f"<{prompt.group_id}>"


def _segments(segments: Iterable[Segment]) -> tuple[Segment, ...]:
    return tuple(segments)


@attrs.frozen(kw_only=True)
class Failure:
    """A failure as a value: safe to keep, log, pickle and write down."""

    cause: Cause
    type: str
    message: str = attrs.field(repr=brief)
    traceback: str = attrs.field(default="", repr=brief)
    group: GroupId | None = None
    attempt: int | None = None

    def __str__(self) -> str:
        return f"{self.cause.value}: {self.type}: {self.message}" if self.type else self.cause.value


@attrs.frozen(kw_only=True)
class Trajectory:
    """The result of one rollout: training rows, a reward, how the rollout ended.

    ``index`` is its place in the group, ``turns`` the number of answers it took. ``reward`` is None until it is scored.
    """

    prompt: Prompt = attrs.field(repr=_id_of)
    index: int
    segments: tuple[Segment, ...] = attrs.field(converter=_segments, repr=brief)
    status: Status = Status.COMPLETED
    stop: Stop = Stop.STOP
    reward: float | Mapping[str, float] | None = None
    turns: int = 1
    metadata: Mapping[str, object] = attrs.field(factory=dict, repr=brief)
    error: Failure | None = None

    @property
    def text(self) -> str:
        """The response as text: that of the last segment."""
        return self.segments[-1].text if self.segments else ""


def _count(values: Sequence[object]) -> str:
    return f"<{len(values)}>"


def _trajectories(trajectories: Iterable[Trajectory]) -> tuple[Trajectory, ...]:
    return tuple(trajectories)


@attrs.frozen(kw_only=True)
class MissingSample:
    """A sample that failed for good, in a group that is delivered without it."""

    index: int
    failure: Failure


def _missing(missing: Iterable[MissingSample]) -> tuple[MissingSample, ...]:
    return tuple(missing)


@attrs.frozen(kw_only=True)
class Group:
    """The *n* trajectories of one prompt; delivered, requeued or set aside as one.

    ``missing`` names the samples without a trajectory; there are none unless ``EngineSettings.min_samples`` allows it.
    """

    id: GroupId = attrs.field(repr=str)
    attempt: int
    prompt: Prompt = attrs.field(repr=False)
    trajectories: tuple[Trajectory, ...] = attrs.field(converter=_trajectories, repr=_count)
    missing: tuple[MissingSample, ...] = attrs.field(default=(), converter=_missing)

    def _versions(self) -> list[int]:
        return [span.version for row in self.trajectories for seg in row.segments for span in seg.versions]

    @property
    def oldest_version(self) -> int | None:
        """Lowest weight version of any sampled token; None if no token was sampled."""
        return min(self._versions(), default=None)

    @property
    def newest_version(self) -> int | None:
        """Highest weight version of any sampled token; None if no token was sampled."""
        return max(self._versions(), default=None)


@attrs.frozen(kw_only=True)
class QuarantineReport:
    """The report on a group that was given up: the cause, the last error, the tries of the sample that was tried most often."""

    id: GroupId
    cause: Cause
    attempts: int
    error: Failure


@attrs.frozen
class Keep:
    """A filter's answer: deliver this group."""


@attrs.frozen
class Drop:
    """A filter's answer: set this group aside, for this reason."""

    reason: str


T = TypeVar("T", bound=Any)


def copied(value: T, kind: type[T], changes: dict[str, object]) -> T:
    """Return a copy of a frozen attrs value with some fields changed; the new values must be as a converter makes them.

    A value of a user's class that extends ``kind`` is evolved by attrs instead: the class may compute or check things.
    """
    if type(value) is not kind:
        again: T = attrs.evolve(value, **changes)
        return again
    copy: T = object.__new__(kind)
    put = object.__setattr__.__get__(copy)
    for name in _FIELDS[kind]:
        put(name, changes[name] if name in changes else getattr(value, name))
    return copy


def trusted(kind: type[T], fields: dict[str, object]) -> T:
    """Return a frozen attrs value of all its fields without a check of them: they must be as the converters make them.

    For what has just been decoded and checked: the converters of a turn and a row cost a thirtieth of a small rollout.
    """
    value: T = object.__new__(kind)
    put = object.__setattr__.__get__(value)
    for name in _FIELDS[kind]:
        put(name, fields[name])
    return value


_FIELDS: Final[Mapping[type, tuple[str, ...]]] = {
    kind: tuple(field.name for field in attrs.fields(kind)) for kind in (Prompt, Segment, Trajectory, Turn)
}

"""Prompts, groups and events for the ledger's tests."""

from collections.abc import Iterator

from trio_rollout._core.enums import Cause, Status, Stop
from trio_rollout._core.ledger_events import (
    Acked,
    Delivered,
    Filtered,
    LedgerEvent,
    Pulled,
    Quarantined,
    Ready,
    Requeued,
    Rescored,
    Restored,
    Retried,
    RunIdentity,
    SampleKept,
    SamplesDropped,
    TurnRecorded,
    TurnsDropped,
    VersionChanged,
)
from trio_rollout._core.samples import SampleCounts
from trio_rollout._core.turn_log import RecordedTurn
from trio_rollout._core.values import (
    Failure,
    Group,
    GroupId,
    Prompt,
    QuarantineReport,
    Segment,
    Trajectory,
    Turn,
    VersionSpan,
)

BIG = 120_000  # tokens of a prompt that alone make a body go to a segment
IDENTITY = RunIdentity(source="prompts.jsonl", samples_per_prompt=2)


def gid(number: int) -> GroupId:
    return GroupId(0, str(number))


def prompt(number: int, *, size: int = 3) -> Prompt:
    return Prompt(id=str(number), input_ids=[number] * size, label=f"answer {number}", metadata={"from": number})


def segment(response: int = 3, *, size: int = 0, text: str = "text") -> Segment:
    return Segment(
        tokens=range(response + size + 1),
        response_length=response,
        loss_mask=[1] * response,
        log_probs=[-0.5] * response,
        versions=[VersionSpan(0, response, 7)],
        text=text,
    )


def group(number: int, attempt: int = 1, *, size: int = 0, samples: int = 1) -> Group:
    of = prompt(number)
    rows = [
        Trajectory(
            prompt=of, index=index, segments=[segment(size=size)], status=Status.TRUNCATED, stop=Stop.LENGTH, reward=1.0
        )
        for index in range(samples)
    ]
    return Group(id=of.group_id, attempt=attempt, prompt=of, trajectories=rows)


def sample(number: int, index: int = 0, attempt: int = 1, *, size: int = 0) -> Trajectory:
    """Return a finished sample; its text tells the attempts apart."""
    text = f"sample {index} of attempt {attempt}"
    return Trajectory(prompt=prompt(number), index=index, segments=[segment(size=size, text=text)], reward=0.5)


def failure(number: int, cause: Cause = Cause.ERROR) -> Failure:
    return Failure(
        cause=cause, type="ValueError", message="judge was out", traceback="...", group=gid(number), attempt=1
    )


def pulled(*numbers: int) -> Pulled:
    return Pulled(prompts=tuple(map(prompt, numbers)), source_state={"at": max(numbers) + 1, "left": [1, None]})


def requeued(
    number: int,
    attempt: int = 1,
    cause: Cause = Cause.ERROR,
    attempts: int = 1,
    samples: tuple[SampleCounts, ...] = (),
) -> Requeued:
    error = failure(number, cause) if cause is Cause.ERROR else None
    return Requeued(
        id=gid(number),
        attempt=attempt,
        cause=cause,
        attempts=attempts,
        unpenalized=0,
        error=error,
        samples=samples,
    )


def finished(number: int, index: int = 0, attempt: int = 1, *, size: int = 0) -> SampleKept:
    return SampleKept(id=gid(number), attempt=attempt, trajectory=sample(number, index, attempt, size=size))


def turn(turn_number: int = 0, *, size: int = 0) -> RecordedTurn:
    """Return the record of a turn, whose prompt is that of its request."""
    answer = Turn(
        rid=f"{turn_number:032x}",
        prompt_ids=(),
        output_ids=range(3 + size),
        log_probs=[-0.5] * (3 + size),
        text=f"turn {turn_number}",
        stop=Stop.STOP,
        weight_version=7,
        versions=[VersionSpan(0, 3 + size, 7)],
        meta_info={"finish_reason": {"type": "stop", "matched": 2}},
    )
    return RecordedTurn(number=turn_number, request=bytes([turn_number] * 16), turn=answer)


def recorded(number: int, index: int = 0, turn_number: int = 0, *, size: int = 0) -> TurnRecorded:
    return TurnRecorded(id=gid(number), index=index, record=turn(turn_number, size=size))


def turns_dropped(number: int, index: int, *numbers: int) -> TurnsDropped:
    return TurnsDropped(id=gid(number), index=index, numbers=numbers)


def dropped(number: int, *indices: int) -> SamplesDropped:
    return SamplesDropped(id=gid(number), indices=indices)


def quarantined(number: int, *unscored: Trajectory) -> Quarantined:
    report = QuarantineReport(id=gid(number), cause=Cause.ERROR, attempts=3, error=failure(number))
    return Quarantined(report=report, unscored=unscored)


def delivered(step: int, *numbers: int) -> Delivered:
    return Delivered(step=step, ids=tuple(map(gid, numbers)))


def acked(step: int, *numbers: int) -> Acked:
    return Acked(step=step, ids=tuple(map(gid, numbers)))


def ready(number: int, attempt: int = 1, *, size: int = 0) -> Ready:
    return Ready(group=group(number, attempt, size=size))


def rescored(number: int, attempt: int = 1, *, size: int = 0) -> Rescored:
    """A finished group with a new body."""
    return Rescored(id=gid(number), number=1, group=group(number, attempt, size=size))


def story(first: int = 0, step: int = 0) -> Iterator[list[list[LedgerEvent]]]:
    """Yield batches of transactions with every kind of event. With small limits they fill, empty and delete segments."""
    a, b, c, d, e, f = range(first, first + 6)
    yield [[pulled(a, b, c, d)], [VersionChanged(version=step)]]
    yield [[recorded(a), recorded(c, 0, size=40), recorded(c, 0, 1), recorded(d, 1, size=40)], [recorded(c, 2)]]
    yield [[finished(a), finished(c, 1, size=40), finished(d, size=40)], [finished(c)]]
    yield [
        [turns_dropped(c, 2, 0, 9), recorded(c, 2, 1, size=40)],
        [ready(a)],
        [ready(b)],
        [requeued(c, samples=(SampleCounts(1, 0), SampleCounts(0, 2)))],
    ]
    yield [[delivered(step, a)], [pulled(e, f)], [finished(a, 1, size=40), finished(c, 1, 2, size=40), dropped(c, 0)]]
    yield [[ready(c, 2, size=40)], [Filtered(id=gid(d), attempt=1, reason="all rewards equal")], [finished(e, size=40)]]
    yield [[recorded(e, 4), recorded(e, 5, size=40)], [recorded(f, 1), recorded(a)]]
    yield [[acked(step, a)], [finished(e, 1), quarantined(e, sample(e, 2), sample(e, 3, size=40))], [finished(f)]]
    yield [[requeued(c, 2, Cause.STALE, attempts=1), finished(c, 0, 2, size=40), finished(c, 1, 2)], [ready(f)]]
    yield [[delivered(step + 1, b), VersionChanged(version=step + 1)]]
    yield [[Restored(step=step, ids=(gid(b),))]]
    yield [[delivered(step + 1, b, f)]]
    yield [[acked(step + 1, b, f)], [ready(c, 3)]]
    yield [[rescored(c, 3, size=40)], [Rescored(id=gid(e), number=1, kept=(sample(e, 2), sample(e, 0, size=40)))]]
    yield [[delivered(step + 2, c)], [Retried(id=gid(e)), finished(e, 3, 2), ready(e, size=40)]]

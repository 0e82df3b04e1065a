"""One group of a ledger as text: its prompt, its trajectories, or why it has none. Pure."""

from collections.abc import Iterator, Mapping

from .._core.values import Failure, Group, Prompt, Segment, Trajectory
from ..ledger import GroupSummary

_MOST_IDS = 64  # token ids that are shown of a prompt or a response without text


def printable(text: str) -> str:
    """The text with control characters and lone surrogates escaped: a model's answer must not drive the terminal."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in "\n\t" else char.encode("unicode_escape").decode() for char in text
    )


def reward_text(reward: float | Mapping[str, float] | None) -> str:
    """A reward on one line."""
    if isinstance(reward, Mapping):
        return ", ".join(f"{name} {value:g}" for name, value in reward.items())
    return "none" if reward is None else f"{reward:g}"


def tries(summary: GroupSummary) -> str:
    """How often it was tried. A group that is through has the number of its last attempt, one that isn't only failures."""
    number = max(summary.attempt, summary.attempts)
    return "not tried yet" if not number else "1 attempt" if number == 1 else f"{number} attempts"


def summary_line(summary: GroupSummary) -> str:
    """A group on one line: id, state, attempts, cause, versions, rewards, last error."""
    parts = [str(summary.id), summary.state.value, tries(summary)]
    if summary.cause is not None:
        parts.append(f"last cause {summary.cause.value}")
    if summary.reason is not None:
        parts.append(summary.reason)
    if summary.newest_version is not None:
        parts.append(f"versions {summary.oldest_version}-{summary.newest_version}")
    if summary.rewards:
        parts.append(f"rewards {'; '.join(map(reward_text, summary.rewards))}")
    if summary.error is not None:
        parts.append(" ".join(f"{summary.error.type}: {summary.error.message}".split()))
    return "  ".join(parts)


def _ids(ids: list[int]) -> str:
    more = f" ... {len(ids) - _MOST_IDS} more" if len(ids) > _MOST_IDS else ""
    return f"token ids {' '.join(map(str, ids[:_MOST_IDS]))}{more}"


def _prompt(prompt: Prompt) -> Iterator[str]:
    if prompt.messages is not None:
        for message in prompt.messages:
            yield f"[{message.get('role', '?')}] {message.get('content', '')}"
    elif prompt.text is not None:
        yield prompt.text
    elif prompt.input_ids is not None:
        yield _ids(prompt.input_ids.tolist())
    if prompt.label is not None:
        yield f"label: {prompt.label}"
    if prompt.metadata:
        yield f"metadata: {dict(prompt.metadata)}"


def _segment(segment: Segment) -> Iterator[str]:
    versions = ", ".join(f"{span.version} [{span.start}:{span.stop}]" for span in segment.versions) or "none"
    prompt_length = len(segment.tokens) - segment.response_length
    yield f"  {prompt_length} + {segment.response_length} tokens, versions {versions}"
    response = segment.tokens[prompt_length:].tolist()
    yield segment.text or (_ids(response) if response else "(no tokens)")


def _trajectory(trajectory: Trajectory) -> Iterator[str]:
    turns = "1 turn" if trajectory.turns == 1 else f"{trajectory.turns} turns"
    yield (
        f"--- rollout {trajectory.index}: {trajectory.status.value}, stop {trajectory.stop.value}, {turns}, "
        f"reward {reward_text(trajectory.reward)}"
    )
    for segment in trajectory.segments:
        yield from _segment(segment)
    if trajectory.error is not None:
        yield from _failure(trajectory.error)


def _failure(failure: Failure) -> Iterator[str]:
    yield f"last error: {failure}"
    if failure.traceback:
        yield failure.traceback.rstrip()


def group_lines(summary: GroupSummary, body: Group | Prompt | None) -> Iterator[str]:
    """The whole group; ``body`` as the ledger has it."""
    yield summary_line(summary)
    if body is None:
        yield "(its body has been reclaimed)"
        return
    yield "--- prompt"
    yield from _prompt(body.prompt if isinstance(body, Group) else body)
    if isinstance(body, Group):
        for trajectory in body.trajectories:
            yield from _trajectory(trajectory)
    if summary.error is not None:
        yield from _failure(summary.error)

"""Functions as users of slime write them: found by dotted path, run on slime's loop. ``SEEN`` has their arguments."""

import asyncio
import copy
import threading

SEEN = []


def answer(sample, text="abc"):
    sample.tokens = [1, 2, *range(10, 10 + len(text))]
    sample.response, sample.response_length = text, len(text)
    sample.rollout_log_probs = [-0.5] * len(text)
    sample.status = type(sample.status).COMPLETED
    return sample


async def generate(args, sample, sampling_params):
    session = getattr(sample, "session_id", None)  # miles has none
    SEEN.append((sample.index, session, sampling_params, threading.current_thread().name))
    sampling_params["max_new_tokens"] -= 1
    await asyncio.sleep(0)
    return answer(sample)


async def generate_eval(args, sample, sampling_params, evaluation=None):
    SEEN.append((sample.index, sample.session_id, sampling_params, evaluation))
    return answer(sample)


async def fan_out(args, sample, sampling_params):
    return [answer(sample), answer(copy.deepcopy(sample), "abcdef")]


async def aborted_first(args, sample, sampling_params):
    SEEN.append((sample.index, sample.session_id))
    if len(SEEN) <= 4:
        answer(sample)
        sample.status = type(sample.status).ABORTED
        return sample
    assert not sample.response, "a retry starts from a pristine sample"
    return answer(sample)


class NoSandbox(Exception):
    """Infrastructure of the user's, for ``--rollout-infrastructure``."""


async def loses_a_sandbox(args, sample, sampling_params):
    """Fail the first try at sample 3, as ``args.lost`` says; an aborted sample comes back with its tokens."""
    SEEN.append(sample.index)
    if sample.index == 3 and SEEN.count(3) == 1:
        if args.lost is None:
            answer(sample).status = type(sample.status).ABORTED
            return sample
        raise args.lost
    return answer(sample)


async def always_aborted(args, sample, sampling_params):
    SEEN.append(sample.index)
    sample.status = type(sample.status).ABORTED
    return sample


async def hang_first(args, sample, sampling_params):
    SEEN.append(sample.index)
    if len(SEEN) == 1:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            SEEN.append("cleaned")
    return answer(sample)


async def hang(args, sample, sampling_params):
    await asyncio.get_running_loop().create_future()


async def reward(args, sample, **kwargs):
    """Single and batched under one path, as slime has it."""
    if isinstance(sample, list):
        SEEN.append(("batch", len(sample)))
        return [{"score": float(one.index), "note": "text"} for one in sample]
    SEEN.append(("single", 1))
    return {"score": float(sample.index), "note": "text"}


def drop_some(args, group):
    return group[0].group_index % 2 == 0


def mark(args, data):
    for group in data:
        group[0].remove_sample = True


async def generate_of_miles(input):  # ruff: ignore[builtin-argument-shadowing]  miles's name
    """The class-based kind: one input, one output."""
    import miles.rollout.base_types as types

    SEEN.append((input.sample.index, input.state, input.evaluation, threading.current_thread().name))
    input.sampling_params["max_new_tokens"] -= 1
    async with input.state.generate_fn_semaphore:
        return types.GenerateFnOutput(samples=answer(input.sample))


class GenerateOfMiles:
    async def __call__(self, input):  # ruff: ignore[builtin-argument-shadowing]  miles's name
        return await generate_of_miles(input)


async def train_waits_for_eval(args, sample, sampling_params, evaluation=None):
    """Wait in training until evaluation was called, so that both are under way at the same time."""
    if evaluation:
        MET.set()
    else:
        while not MET.is_set():
            await asyncio.sleep(0)
    return answer(sample)


MET = threading.Event()


async def older_first(args, sample, sampling_params):
    """Sample under version 3 at the first try, under version 5 later."""
    answer(sample)
    sample.weight_versions = ["5"] if sample.index in SEEN else ["4", "3"]
    SEEN.append(sample.index)
    return sample


async def uneven_reward(args, sample, **kwargs):
    """A dict whose names differ between the samples of a group, with text beside its numbers."""
    return {"score": 1.0, "pred": "42", **({"format": 0.5} if sample.index % 2 else {})}


async def worded_reward(args, sample, **kwargs):
    """A dict without a number, for a custom post-processing of the host."""
    return {"verdict": "good"}

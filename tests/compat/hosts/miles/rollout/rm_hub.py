"""Stand-in for miles's rewards: the hub finds the user's function itself, the sample's own first."""

import importlib


def _custom(args, sample):
    spec = sample.reward_spec
    path = (spec.custom_rm_path if spec is not None else None) or args.custom_rm_path
    if path is None:
        return None
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


async def async_rm(args, sample, **kwargs):
    custom = _custom(args, sample)
    return float(len(sample.response)) if custom is None else await custom(args, sample, **kwargs)


async def batched_async_rm(args, samples, *, inplace_set_reward_field=False, **kwargs):
    custom = _custom(args, samples[0])
    rewards = (
        [await async_rm(args, one) for one in samples] if custom is None else await custom(args, samples, **kwargs)
    )
    if not inplace_set_reward_field:
        return rewards
    for sample, reward in zip(samples, rewards, strict=True):
        sample.reward = reward
    return None

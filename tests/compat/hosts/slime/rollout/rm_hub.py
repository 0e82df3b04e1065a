"""Stand-in for slime's stock rewards."""


async def async_rm(args, sample, **kwargs):
    return float(len(sample.response))


async def batched_async_rm(args, samples, **kwargs):
    return [await async_rm(args, sample) for sample in samples]

"""slime's evaluation: its datasets as prompts of the engine, and finished groups as slime's answer."""

import copy
from collections.abc import Iterable, Iterator, Sequence
from itertools import starmap
from typing import Any

from trio_rollout import Group, Prompt, Status

from ._arguments import Arguments
from ._samples import KEY, HostGroup, flat, prompt_of

_OWN = ("multimodal_keys", "apply_chat_template", "apply_chat_template_kwargs")
_SAMPLING = {
    "stop": "rollout_stop",
    "stop_token_ids": "rollout_stop_token_ids",
    "skip_special_tokens": "rollout_skip_special_tokens",
}


def _dataset(args: Arguments, config: Any) -> Any:
    processing = args.module("utils.processing_utils")
    own = {name: getattr(config, name, None) for name in _OWN}
    template = {"chat_template_path": args.chat_template_path} if "chat_template_path" in args.names else {}
    return args.module("utils.data").Dataset(
        path=config.path,
        tokenizer=processing.load_tokenizer(args.hf_checkpoint, trust_remote_code=True, **template),
        processor=processing.load_processor(args.hf_checkpoint, trust_remote_code=True),
        max_length=args.eval_max_prompt_len,
        prompt_key=config.input_key,
        label_key=config.label_key,
        metadata_key=config.metadata_key,
        tool_key=config.tool_key,
        **{name: getattr(args, name) if value is None else value for name, value in own.items()},
    )


def _sampling(args: Arguments, config: Any) -> dict[str, Any]:
    params = {
        "temperature": config.temperature,
        "top_p": config.top_p,
        "top_k": config.top_k,
        "max_new_tokens": config.max_response_len,
        "no_stop_trim": getattr(config, "no_stop_trim", None) is not False,
        "spaces_between_special_tokens": False,
    }
    for name, fallback in _SAMPLING.items():
        own = getattr(config, name, None)
        params[name] = getattr(args, fallback) if own is None else own
    least = getattr(config, "min_new_tokens", None)
    least = args.eval_min_new_tokens if least is None else least
    optional = {"repetition_penalty": getattr(config, "repetition_penalty", None), "min_new_tokens": least}
    return params | {name: value for name, value in optional.items() if value is not None}


def _copies(args: Arguments, config: Any) -> Iterator[HostGroup]:
    """Yield each prompt once for each of its samples; samples are numbered from 0 in a dataset."""
    sampling, index = _sampling(args, config), 0
    for given in _dataset(args, config).samples:
        for number in range(config.n_samples_per_eval_prompt):
            sample = copy.deepcopy(given)
            sample.index = index
            sample.metadata = config.inject_metadata(getattr(sample, "metadata", None))
            sample.custom_rm_path = getattr(config, "custom_rm_path", None)
            sample.generate_function_path = getattr(config, "custom_generate_function_path", None)
            yield HostGroup([sample], args.seeded(sampling, number), config.name)
            index += 1


def eval_prompts(args: Arguments) -> list[Prompt]:
    """Return every prompt of every dataset."""
    every = [group for config in args.eval_datasets or () for group in _copies(args, config)]
    return list(starmap(prompt_of, enumerate(every)))


def _of(name: str, groups: Iterable[Group]) -> Iterator[Group]:
    for group in groups:
        given = group.prompt.metadata[KEY]
        if isinstance(given, HostGroup) and given.dataset == name:
            yield group


def evaluated(args: Arguments, groups: Sequence[Group]) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the host's results by dataset, in the order of the samples, and metrics.

    The metrics count the prompts that failed for good: they have no reward, and are not scored as 0.
    """
    data, metrics, key = {}, {}, args.eval_reward_key or args.reward_key
    for config in args.eval_datasets or ():
        rows = [row for group in _of(config.name, groups) for row in group.trajectories]
        samples = [sample for row in rows if row.status is not Status.FAILED for sample in flat(row.metadata[KEY])]
        samples.sort(key=lambda sample: sample.index)
        data[config.name] = {
            "rewards": [sample.reward[key] if key else sample.reward for sample in samples],
            "truncated": [sample.status.value == "truncated" for sample in samples],
            "samples": samples,
        }
        metrics[f"eval/{config.name}-failed"] = sum(row.status is Status.FAILED for row in rows)
    return data, metrics

"""The host's ``args``: every attribute that is read, with the default for versions of the host that lack it."""

import importlib
import math
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Mapping
from typing import Any, Final

import attrs

from trio_rollout import Discard, Retry, Staleness
from trio_rollout.errors import SettingsError

REQUIRED: Final = object()
"""The host always sets it."""

ARGUMENTS: Final[dict[str, object]] = {
    "rollout_batch_size": REQUIRED,
    "n_samples_per_prompt": 1,
    "over_sampling_batch_size": None,
    "rollout_group_timeout_s": 1800.0,
    "rollout_infrastructure": (),
    "partial_rollout": False,
    "mask_offpolicy_in_partial_rollout": False,
    "rollout_temperature": 1.0,
    "rollout_top_p": 1.0,
    "rollout_top_k": -1,
    "rollout_max_response_len": REQUIRED,
    "rollout_stop": None,
    "rollout_stop_token_ids": None,
    "rollout_skip_special_tokens": False,
    "rollout_seed": 42,
    "sglang_enable_deterministic_inference": False,
    "custom_generate_function_path": None,
    "custom_rm_path": None,
    "group_rm": False,
    "rm_type": None,
    "reward_key": None,
    "eval_reward_key": None,
    "dynamic_sampling_filter_path": None,
    "rollout_sample_filter_path": None,
    "hf_checkpoint": None,
    "rollout_external_engine_addrs": None,
    "sglang_router_ip": None,
    "sglang_router_port": None,
    "eval_datasets": None,
    "eval_max_prompt_len": None,
    "eval_min_new_tokens": None,
    "multimodal_keys": None,
    "apply_chat_template": False,
    "apply_chat_template_kwargs": None,
}

REFUSED: Final[dict[str, str]] = {
    "use_rollout_routing_replay": "routed experts are not handed on yet",
    "rollout_sample_hook_path": "sample hooks are not called yet; do it in the custom generate function",
    "buffer_filter_path": "requeued groups wait in the engine, in their order",
    "rollout_all_samples_process_path": "filtered groups are not kept",
}
"""Flags that are refused, because they would be ignored without a word; each with the reason."""


@attrs.frozen(eq=False)
class Arguments:
    """The ``args`` of slime, or of a host made from it, read once.

    ``given`` is the namespace itself, as user functions get it. ``host`` is the package of the host's modules, ``names`` the
    attributes that may be read, with their defaults.
    """

    given: Any
    host: str = "slime"
    names: Mapping[str, object] = attrs.field(default=ARGUMENTS, repr=False)

    def __getattr__(self, name: str) -> Any:
        if name not in self.names:
            raise AttributeError(f"args.{name} is not in the list of attributes that are read")
        default = self.names[name]
        return getattr(self.given, name) if default is REQUIRED else getattr(self.given, name, default)

    def module(self, name: str) -> Any:
        """Import a module of the host and return it."""
        return importlib.import_module(f"{self.host}.{name}")

    @property
    def group_timeout(self) -> float | None:
        """Seconds for one attempt at a group; None for no limit.

        Raises:
          SettingsError: the flag is not a number.
        """
        value = self.rollout_group_timeout_s
        if not isinstance(value, int | float) or isinstance(value, bool) or math.isnan(value):
            raise SettingsError(f"--rollout-group-timeout-s: {_no_timeout(value)}")
        return float(value) if value > 0 else None

    @property
    def retry(self) -> Retry:
        """The engine's defaults, with the classes of ``--rollout-infrastructure`` beside those that it knows."""
        known = Retry()
        return attrs.evolve(known, infrastructure=(*known.infrastructure, *(self.rollout_infrastructure or ())))

    @property
    def staleness(self) -> Staleness:
        """``--max-weight-staleness``, where the host has it: older groups are sampled again."""
        limit = self.max_weight_staleness if "max_weight_staleness" in self.names else None
        return Staleness(max_versions=limit, policy=Discard())

    @property
    def groups_at_once(self) -> int:
        """Number of groups in flight."""
        bound = self.async_max_concurrent_samples if "async_max_concurrent_samples" in self.names else None
        if bound:
            return max(1, int(bound) // int(self.n_samples_per_prompt))
        return int(self.over_sampling_batch_size or self.rollout_batch_size)

    @property
    def _cuts_off(self) -> bool:
        return bool(self.rollout_top_p < 1.0)

    def refuse_unsupported(self) -> None:
        """Raise SettingsError for a flag that would be ignored."""
        for name, reason in REFUSED.items():
            if getattr(self.given, name, None):
                raise SettingsError(f"--{name.replace('_', '-')}: {reason}")
        if self._cuts_off and self.custom_generate_function_path is None:
            raise SettingsError("--rollout-top-p other than 1.0 needs top-p token ids, which are not handed on yet")

    def sampling(self, index: int) -> dict[str, Any]:
        """Return the host's sampling parameters for one sample: a new dict, because user code changes it."""
        params = {
            "temperature": self.rollout_temperature,
            "top_p": self.rollout_top_p,
            "top_k": self.rollout_top_k,
            "max_new_tokens": self.rollout_max_response_len,
            "stop": self.rollout_stop,
            "stop_token_ids": self.rollout_stop_token_ids,
            "skip_special_tokens": self.rollout_skip_special_tokens,
            "no_stop_trim": True,
            "spaces_between_special_tokens": False,
        }
        if self._cuts_off:
            params["custom_params"] = {"return_top_p_token_ids": True}
        return self.seeded(params, index)

    def seeded(self, params: dict[str, Any], index: int) -> dict[str, Any]:
        """Return a copy, with a seed for this sample if inference is to be deterministic."""
        seed = {"sampling_seed": self.rollout_seed + index} if self.sglang_enable_deterministic_inference else {}
        return {**params, **seed}


def _no_timeout(value: object) -> str:
    return f"got {value!r}, allowed: a number of seconds; 0 or less means no timeout (the word None does not)"


def _timeout(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ArgumentTypeError(_no_timeout(text)) from None
    if math.isnan(value):
        raise ArgumentTypeError(_no_timeout(text))
    return value


def add_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add the flags that a host's argument parser does not know."""
    parser.add_argument(
        "--rollout-group-timeout-s",
        type=_timeout,
        default=ARGUMENTS["rollout_group_timeout_s"],
        help="seconds that one attempt at a group may take; 0 or less for no limit",
    )
    parser.add_argument(
        "--rollout-infrastructure",
        nargs="+",
        default=ARGUMENTS["rollout_infrastructure"],
        metavar="MODULE.CLASS",
        help="exceptions of your functions that mean a lost sandbox or the like: they use up no try of a sample",
    )
    return parser

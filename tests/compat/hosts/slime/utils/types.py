"""Stand-in for slime's Sample: the fields, their order and their defaults, and the methods that user code calls."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any


@dataclass
class Sample:
    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: str | list[dict[str, str]] = ""
    tokens: list[int] = field(default_factory=list)
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    multimodal_train_input_id: str | None = None
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_top_p_token_ids: list[int] | None = None
    rollout_top_p_token_offsets: list[int] | None = None
    rollout_routed_experts: Any = None
    remove_sample: bool = False
    teacher_log_probs: list[float] | None = None

    class Status(Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    status: Status = Status.PENDING
    metadata: dict = field(default_factory=dict)
    generate_function_path: str | None = None
    custom_rm_path: str | None = None
    train_metadata: dict | None = None
    session_id: str | None = None
    non_generation_time: float = 0.0

    @dataclass
    class SpecInfo:
        completion_token_num: int = 0

        def add(self, meta_info):
            self.completion_token_num += meta_info.get("completion_tokens", 0)

    @dataclass
    class PrefixCacheInfo:
        cached_tokens: int = 0
        total_prompt_tokens: int = 0

        def add(self, meta_info):
            self.cached_tokens += meta_info.get("cached_tokens", 0)
            self.total_prompt_tokens += meta_info.get("prompt_tokens", 0)

    spec_info: SpecInfo = field(default_factory=SpecInfo)
    prefix_cache_info: PrefixCacheInfo = field(default_factory=PrefixCacheInfo)

    def get_reward_value(self, args):
        return self.reward[args.reward_key] if args.reward_key else self.reward

    @property
    def effective_response_length(self):
        return self.response_length if self.loss_mask is None else sum(self.loss_mask)

    def append_response_tokens(
        self, args=None, *, tokens=None, log_probs=None, trainable=True, meta_info=None, text=None,
        update_terminal_info=True,
    ):  # fmt: skip
        """Trainable tokens need log-probs, others must not have any."""
        tokens = list(tokens or [])
        if trainable and tokens and (log_probs is None or len(log_probs) != len(tokens)):
            raise ValueError(f"{len(tokens)} trainable tokens need as many log-probs")
        if not trainable and log_probs is not None:
            raise ValueError("tokens that are not trained have no log-probs")
        mask = self.loss_mask if self.loss_mask is not None else [1] * self.response_length
        self.loss_mask = [*mask, *[int(trainable)] * len(tokens)]
        self.rollout_log_probs = [*(self.rollout_log_probs or []), *(log_probs or [0.0] * len(tokens))]
        self.tokens = [*self.tokens, *tokens]
        self.response += text or ""
        self.response_length += len(tokens)
        if meta_info is not None and "weight_version" in meta_info:
            self.weight_versions.append(meta_info["weight_version"])
        ends = {"length": "truncated", "abort": "aborted", "stop": "completed"}
        if update_terminal_info and meta_info is not None and meta_info["finish_reason"]["type"] in ends:
            self.status = Sample.Status(ends[meta_info["finish_reason"]["type"]])

"""Stand-in for miles's Sample: slime's, with the differences."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any


@dataclass
class AdapterRef:
    name: str
    slot: int


@dataclass
class RewardSpec:
    rm_type: str | None = None
    custom_rm_path: str | None = None


@dataclass
class Sample:
    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: str | list[dict[str, str]] = ""
    tokens: list[int] = field(default_factory=list)
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_routed_experts: Any = None
    rollout_indexer_topk: Any = None
    remove_sample: bool = False
    teacher_log_probs: list[float] | None = None
    opd_reverse_kl: list[float] | None = None

    class Status(Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    status: Status = Status.PENDING
    metadata: dict = field(default_factory=dict)
    generate_function_path: str | None = None
    train_metadata: dict | None = None
    adapter: AdapterRef | None = None
    reward_spec: RewardSpec | None = None
    routing_key: str | None = None
    non_generation_time: float = 0.0

    def validate(self):
        assert len(self.tokens) >= self.response_length >= 0
        for values in (self.loss_mask, self.rollout_log_probs):
            assert values is None or len(values) == self.response_length

    @property
    def oldest_weight_version(self):
        return min((int(version) for version in self.weight_versions if version.isdecimal()), default=None)

    def reset_for_retry(self):
        """As in miles, it leaves the status ABORTED."""
        kept = {
            name: getattr(self, name)
            for name in (
                "group_index", "index", "prompt", "label", "multimodal_inputs", "metadata", "generate_function_path",
                "routing_key",
            )
        }  # fmt: skip
        self.__init__(**kept, status=Sample.Status.ABORTED)

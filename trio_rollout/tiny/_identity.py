"""A tiny server's description of itself: ``/model_info``, ``/server_info``, ``/v1/loads``, ``/v1/models``."""

from datetime import UTC, datetime
from typing import Any, final

import attrs
import trio

from ._frontend import Frontend

VERSION = "0.5.23"
"""The SGLang version whose protocol this is; clients choose by it how to talk."""


@final
@attrs.define(eq=False, repr=False, kw_only=True)
class Identity:
    """Names, paths and health. A weight update from disk changes the paths, as in SGLang."""

    model_path: str
    served_model_name: str
    tokenizer_path: str
    reasoning_parser: str | None = None
    healthy: bool = True

    def model_info(self, version: str) -> dict[str, Any]:
        """Return the answer to ``/model_info``."""
        return {
            "model_path": self.model_path,
            "served_model_name": self.served_model_name,
            "tokenizer_path": self.tokenizer_path,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": version,
            "load_format": "auto",
            "reasoning_parser": self.reasoning_parser,
            "tool_call_parser": "qwen25",
            "disaggregation_mode": "null",
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "model_type": "tiny_table",
            "architectures": ["TinyTableLM"],
        }

    def server_info(self, frontend: Frontend) -> dict[str, Any]:
        """Return the answer to ``/server_info``."""
        settings, scheduler = frontend.settings, frontend.scheduler
        return {
            "model_path": self.model_path,
            "tokenizer_path": self.tokenizer_path,
            "served_model_name": self.served_model_name,
            "tool_call_parser": "qwen25",
            "context_length": settings.context_length,
            "max_running_requests": settings.max_running,
            "max_queued_requests": settings.max_queued,
            "incremental_streaming_output": settings.incremental,
            "random_seed": settings.seed,
            "weight_version": scheduler.version,
            "device": "cpu",
            "tp_size": 1,
            "dp_size": 1,
            "max_req_input_len": settings.context_length - 1,
            "max_total_num_tokens": settings.cache_tokens,
            "internal_states": [{"effective_max_running_requests_per_dp": settings.max_running}],
            "version": VERSION,
        }

    def loads(self, frontend: Frontend) -> dict[str, Any]:
        """Return the answer to ``/v1/loads``."""
        scheduler = frontend.scheduler
        load = scheduler.load if scheduler.paused else scheduler.load_now()
        room = frontend.settings.cache_tokens
        return {
            "timestamp": datetime.fromtimestamp(trio.current_time(), UTC).isoformat(),  # of the run, not of the day
            "version": VERSION,
            "accelerator": "cpu",
            "num_accelerators": 1,
            "loads": [
                {
                    "timestamp": trio.current_time(),
                    "dp_rank": 0,
                    "num_running_reqs": load.running,
                    "num_waiting_reqs": load.waiting,
                    "num_used_tokens": load.used_tokens,
                    "num_total_tokens": load.used_tokens,
                    "num_active_tokens": load.used_tokens,
                    "max_total_num_tokens": room,
                    "max_running_requests": frontend.settings.max_running,
                    "token_usage": load.used_tokens / room if room else 0.0,
                    "gen_throughput": 0.0,
                    "cache_hit_rate": 0.0,
                    "utilization": load.running / frontend.settings.max_running,
                    "memory": {"token_capacity": room},
                    "queues": {"waiting": load.waiting, "grammar": 0, "paused": 0, "retracted": load.retracted},
                }
            ],
        }

"""Stock scorers, and two ways to make a synchronous scorer async: threads, and processes that can be killed."""

from .._util.threads import in_thread
from ._match import exact_match, regex_reward
from ._processes import in_process, open_scorer_processes

__all__ = [
    "exact_match",
    "in_process",
    "in_thread",
    "open_scorer_processes",
    "regex_reward",
]

"""Stock scorers, and two ways to make a synchronous scorer async: threads, and processes that can be killed."""

from .._util.threads import in_thread as in_thread
from ._match import exact_match as exact_match
from ._match import regex_reward as regex_reward
from ._processes import in_process as in_process
from ._processes import open_scorer_processes as open_scorer_processes

__all__ = [
    "exact_match",
    "in_process",
    "in_thread",
    "open_scorer_processes",
    "regex_reward",
]

"""Stand-in for the result of miles's dynamic filters."""

from dataclasses import dataclass


@dataclass
class DynamicFilterOutput:
    keep: bool
    reason: str | None = None

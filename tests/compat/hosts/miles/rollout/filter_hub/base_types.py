"""Stand-in for what a dynamic filter may return to miles."""

from dataclasses import dataclass


@dataclass
class DynamicFilterOutput:
    keep: bool
    reason: str | None = None

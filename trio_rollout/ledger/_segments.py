"""Segment files: bodies, one behind the other."""


def name_of(segment: int) -> str:
    """The file of a segment."""
    return f"{segment:010d}.seg"

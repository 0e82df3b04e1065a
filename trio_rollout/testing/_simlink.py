"""How a simulated network behaves: delays, sizes, and what goes wrong how often. Values only."""

import attrs

_RANGE = attrs.validators.deep_iterable(attrs.validators.ge(0.0))
_SHARE = attrs.validators.and_(attrs.validators.ge(0.0), attrs.validators.le(1.0))


@attrs.frozen(kw_only=True)
class Link:
    """Every connection of a network.

    ``latency``: least and longest seconds on the way, drawn for each piece; the order stays. ``window``: bytes that are taken
    before the other side has received any. ``split``: how often a send or a receive moves less than it could.
    """

    latency: tuple[float, float] = attrs.field(default=(0.0002, 0.02), validator=_RANGE)
    window: int = attrs.field(default=65536, validator=attrs.validators.ge(1))
    split: float = attrs.field(default=0.2, validator=_SHARE)


@attrs.frozen(kw_only=True)
class NetFaults:
    """The share of connections, drawn from the network's seed, to which each of these happens.

    ``refused``: the connect fails. ``unanswered``: the connect is never answered. ``reset``, ``silent``: after up to
    ``within`` bytes the connection is reset, or carries nothing more while both sides take it for open.
    """

    refused: float = attrs.field(default=0.0, validator=_SHARE)
    unanswered: float = attrs.field(default=0.0, validator=_SHARE)
    reset: float = attrs.field(default=0.0, validator=_SHARE)
    silent: float = attrs.field(default=0.0, validator=_SHARE)
    within: int = attrs.field(default=4096, validator=attrs.validators.ge(1))

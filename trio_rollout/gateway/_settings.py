"""Settings of one gateway: where it listens, and its limits."""

import attrs

from .._core.checks import at_least, seconds, whole

_optional_whole = attrs.validators.optional(whole(1))


@attrs.frozen(kw_only=True)
class GatewaySettings:
    """One gateway. All times are seconds.

    ``host`` and ``port`` (0: a free one) are where it listens; agents in containers need another host than loopback, and
    ``public_url`` is then what they are told. ``max_body`` bounds a request's bytes, ``max_head`` those of its head,
    ``max_requests`` the requests at once.

    Of each session: ``max_turns`` (those whose client left do not count) and ``max_concurrent_turns``; ``drain`` is how long closing lets running turns finish.
    ``context_length`` bounds prompt and answer together (None: what the servers say); ``default_max_tokens`` is for agents
    that name no limit (None: the rollout's sampling does).

    ``agents_choose_temperature``: whether an agent's temperature and top_p count; by default the rollout's sampling wins,
    because what is trained on has to be the policy's own distribution. ``tool_parser`` and ``reasoning_parser`` are
    names of SGLang's parsers (None: what the servers say they were started with).

    ``tombstones`` and ``tombstone_seconds`` bound how many closed sessions are remembered, and how long, so that their
    late calls get a clear answer. ``body_seconds``: how long a request may take to arrive. ``send_seconds``: how long a
    client may read nothing.

    Raises:
      SettingsError: a field is out of its range.

    """

    host: str = "127.0.0.1"
    port: int = attrs.field(default=0, validator=whole(0))
    public_url: str | None = None
    model: str = "policy"
    max_body: int = attrs.field(default=32 * 1024 * 1024, validator=whole(1))
    max_head: int = attrs.field(default=64 * 1024, validator=whole(1024))
    max_requests: int = attrs.field(default=4096, validator=whole(1))
    max_turns: int | None = attrs.field(default=None, validator=_optional_whole)
    max_concurrent_turns: int = attrs.field(default=16, validator=whole(1))
    drain: float = attrs.field(default=5.0, converter=float, validator=at_least(0.0))
    context_length: int | None = attrs.field(default=None, validator=_optional_whole)
    default_max_tokens: int | None = attrs.field(default=None, validator=_optional_whole)
    agents_choose_temperature: bool = False
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    tombstones: int = attrs.field(default=4096, validator=whole(0))
    tombstone_seconds: float = attrs.field(default=600.0, converter=float, validator=seconds)
    body_seconds: float = attrs.field(default=60.0, converter=float, validator=seconds)
    send_seconds: float = attrs.field(default=30.0, converter=float, validator=seconds)

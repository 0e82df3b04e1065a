"""Settings of one gateway: its address and its limits."""

from collections.abc import Mapping

import attrs

from .._core.checks import at_least, names_suggested, seconds, whole
from ..tokenizer._tokenizer import require_variables


def _names(_: object, field: "attrs.Attribute[Mapping[str, object]]", value: Mapping[str, object]) -> None:
    require_variables(value, field.name)


_optional_whole = attrs.validators.optional(whole(1))


@names_suggested
@attrs.frozen(kw_only=True)
class GatewaySettings:
    """Settings of one gateway. All times are seconds.

    - ``host`` and ``port`` (0: a free port): the address to listen on. Agents in containers need another host than
      loopback; ``public_url`` is then the URL that they are given.
    - ``max_body`` and ``max_head``: most bytes of a request's body and head. ``max_requests``: most requests at once.
      ``max_connections``: most connections; None takes half of the files that the process may open. A newcomer beyond that
      closes the connection that has been idle for longest, or is refused with 503 if there is none.
    - ``max_turns``: most turns of a session; a turn whose client left does not count. ``max_concurrent_turns``: most
      turns of a session that are sampled at once. Up to ``max_waiting_turns`` more wait for their place, each for
      ``wait_seconds``; beyond that they are refused with 429. ``drain``: time that running turns have to finish when a session is closed.
    - ``context_length``: most tokens of prompt and answer together; None takes the servers' limit.
      ``default_max_tokens``: most new tokens for agents that name no limit; None takes the limit of the rollout's sampling.
    - ``agents_choose_temperature``: use the temperature and top_p of an agent's request. By default those of the rollout's
      sampling are used, because training needs log-probs of the policy as the trainer thinks it was sampled.
    - ``template_variables``: variables of the chat template, such as ``{"enable_thinking": False}``. Those that a request
      sets take precedence over them, and they over the tokenizer's.
    - ``tool_parser`` and ``reasoning_parser``: names of SGLang's parsers; None takes those of the servers.
    - ``tombstones`` and ``tombstone_seconds``: closed sessions are remembered up to this number and for this time, so
      that their late requests are told that the session is closed.
    - ``heartbeat``: a stream begins at the latest after this time, and never says nothing for longer: an event without
      content is sent. Clients give up a silent stream.
    - ``body_seconds``: most time for a request to arrive. ``send_seconds``: most time that a client may read nothing.

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
    max_connections: int | None = attrs.field(default=None, validator=_optional_whole)
    max_turns: int | None = attrs.field(default=None, validator=_optional_whole)
    max_concurrent_turns: int = attrs.field(default=16, validator=whole(1))
    max_waiting_turns: int = attrs.field(default=1024, validator=whole(0))
    wait_seconds: float = attrs.field(default=600.0, converter=float, validator=seconds)
    drain: float = attrs.field(default=5.0, converter=float, validator=at_least(0.0))
    context_length: int | None = attrs.field(default=None, validator=_optional_whole)
    default_max_tokens: int | None = attrs.field(default=None, validator=_optional_whole)
    agents_choose_temperature: bool = False
    template_variables: Mapping[str, object] = attrs.field(factory=dict, converter=dict, validator=_names)
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    tombstones: int = attrs.field(default=4096, validator=whole(0))
    tombstone_seconds: float = attrs.field(default=600.0, converter=float, validator=seconds)
    heartbeat: float = attrs.field(default=2.0, converter=float, validator=seconds)
    body_seconds: float = attrs.field(default=60.0, converter=float, validator=seconds)
    send_seconds: float = attrs.field(default=30.0, converter=float, validator=seconds)

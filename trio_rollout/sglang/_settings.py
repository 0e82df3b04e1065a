"""Settings of the client: frozen, validated at construction. All times are seconds."""

import attrs

from .._core.checks import at_least, names_suggested, seconds, whole
from .._core.enums import CacheSalt


@names_suggested
@attrs.frozen(kw_only=True)
class ServerSettings:
    """The client's behaviour towards its servers.

    ``vocab_size``: token ids at or above it are refused before sending, because a real SGLang dies of them; None: read from
    ``config.json`` under the server's model path where that is readable. ``context_length``: a request asks for no more tokens
    than fit behind its prompt, and a prompt that leaves no room is refused; None: the servers' answer. ``abort``: how long a cancelled request may take
    to be acknowledged; ``control``: one pause, resume, flush or version call; an engine brings its own for both.
    ``connect``: opening one connection. ``probe``: time between two looks at a lost server.

    A server that is busy (503, 429, …) is asked again after ``backoff_base``, doubled each time up to ``backoff_max``, or
    after its Retry-After, up to ``retry_after_max``; the caller's deadline ends it. ``idle``: idle connections are closed
    after so long, below the 5 s after which SGLang closes them itself; at most ``max_idle`` are kept per server.
    ``affinity_keys``: how many session keys are remembered. ``api_key`` is sent as a bearer token.
    ``ca_file``: certificates to trust for ``https`` in place of the system's. ``proxy``: an HTTP proxy
    (``http://host:port``, without a user) through which every server is reached with CONNECT, over http too; the environment's
    is not read. ``resume_at_start``: resume a server that is
    not ready when the client is opened; right if no other client uses it, because a run that was killed inside a weight update
    leaves its servers paused. ``cache_salt``: what is sent as each request's ``cache_salt``, once an engine requires a weight
    version; a salt of the caller's is kept as a part of it.

    Raises:
      SettingsError: a field is out of its range; the message names the field, the value and the range.
    """

    vocab_size: int | None = attrs.field(default=None, validator=attrs.validators.optional(whole(1)))
    context_length: int | None = attrs.field(default=None, validator=attrs.validators.optional(whole(2)))
    abort: float = attrs.field(default=5.0, validator=seconds)
    control: float = attrs.field(default=30.0, validator=seconds)
    connect: float = attrs.field(default=5.0, validator=seconds)
    probe: float = attrs.field(default=1.0, validator=seconds)
    backoff_base: float = attrs.field(default=0.1, converter=float, validator=at_least(0.001))
    backoff_max: float = attrs.field(default=5.0, converter=float, validator=at_least(0.001))
    retry_after_max: float = attrs.field(default=60.0, converter=float, validator=at_least(0.0))
    idle: float = attrs.field(default=4.0, converter=float, validator=at_least(0.0))
    max_idle: int = attrs.field(default=1024, validator=whole(0))
    affinity_keys: int = attrs.field(default=65536, validator=whole(1))
    resume_at_start: bool = False
    cache_salt: CacheSalt = attrs.field(default=CacheSalt.VERSION, validator=attrs.validators.instance_of(CacheSalt))
    ca_file: str | None = None
    proxy: str | None = None
    api_key: str | None = attrs.field(default=None, repr=False)

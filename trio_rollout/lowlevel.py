"""The ground floor for adapters: what the package itself is built on, for code that connects it to other hosts and clients.

``trio_rollout_compat`` imports only public names, these among them, and so can adapters of your own. The names follow the
same rules of compatibility as the rest of the public API. Everything here belongs to one Trio run; nothing may be called
from another thread.

- Lifetimes: ``open_service`` runs a task beside a body, which stays alive for the cleanup of that body;
  ``open_service_nursery`` does the same for many tasks.
- Waiting: ``Condition`` waits for a condition over shared state, ``wait_s`` for time to pass, and ``backoff_s`` says how
  long before the next try.
- Connections: a ``Connector`` for ``open_sglang_servers(connect=...)`` is given an ``Address`` and opens a ``Connection``.
- Failures: ``ends_the_process`` tells what user code raised from what must go on, ``cause_of`` and ``failure_of`` make a value of it.
- ``Ports`` is the source of randomness and request ids; ``seconds`` validates a setting.

The reasons are in docs/decisions/0042-adapters-stand-on-public-names.md.
"""

from ._core.checks import seconds
from ._core.failures import cause_of, failure_of
from ._http.connection import Address, Connection, Connector
from ._util.condition import Condition
from ._util.ports import Ports
from ._util.service import Serve, open_service, open_service_nursery
from ._util.time import backoff_s, wait_s
from ._util.user_code import ends_the_process

__all__ = [
    "Address",
    "Condition",
    "Connection",
    "Connector",
    "Ports",
    "Serve",
    "backoff_s",
    "cause_of",
    "ends_the_process",
    "failure_of",
    "open_service",
    "open_service_nursery",
    "seconds",
    "wait_s",
]

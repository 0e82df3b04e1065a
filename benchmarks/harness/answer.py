"""A whole answer, and what its decoder wants to know of its request."""

import attrs

from trio_rollout import SamplingParams
from trio_rollout.sglang._wire import GenerateRequest, RequestEncoder

from .bodies import make_body

RID = "0" * 32


@attrs.frozen
class Asked:
    """A request that this answer may be an answer to."""

    request: GenerateRequest
    attempted: str = "POST /generate"
    rid: str = RID

    def version_of(self, _name: object, /) -> int:
        """Any."""
        return 0


def asked_for(tokens: int) -> Asked:
    """A request for so many tokens."""
    return Asked(RequestEncoder(None).encode([1, 2, 3], SamplingParams(max_new_tokens=tokens), {}))


def answer_of(tokens: int) -> bytes:
    """A whole answer."""
    head, tail = make_body(tokens)
    middle = f'{RID}","e2e_latency":1.5,"weight_version":"default","finish_reason":{{"type":"stop","matched":2}}'
    return head + middle.encode() + tail

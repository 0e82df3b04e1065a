"""Why a request gets no answer: a status, words, and headers that tell real clients whether to try again."""

from collections.abc import Mapping

import attrs

from ..errors import RequestRejected, SessionClosed

# OpenAI's and Anthropic's clients obey it before all else; without it they try a 503 or 429 again.
NO_RETRY: Mapping[str, str] = {"x-should-retry": "false"}
RETRY: Mapping[str, str] = {"retry-after": "1", "x-should-retry": "true"}


class Refusal(Exception):  # not a RolloutError: it never leaves the gateway
    """A request that is answered with an error."""

    def __init__(self, status: int, message: str, headers: Mapping[str, str] = NO_RETRY) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.headers = headers


@attrs.frozen
class Limit:
    """A limit that was reached: what, how much, and whether it may be otherwise soon."""

    what: str
    most: int
    passing: bool

    def refusal(self) -> Refusal:
        """As an answer: 429."""
        return Refusal(429, f"{self.what}: the limit is {self.most}", RETRY if self.passing else NO_RETRY)


def refusal_of(error: Exception) -> Refusal:
    """What an agent is told about a turn's failure."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, SessionClosed):
        return Refusal(503, str(error))
    if isinstance(error, RequestRejected):
        return Refusal(400, str(error))
    return Refusal(503, f"the model could not be reached: {error}", RETRY)

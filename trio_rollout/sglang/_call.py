"""One try of one request on one server, as a value."""

import attrs

from .._core.values import Turn
from ..errors import ServerError
from ._http import Response
from ._naming import Named
from ._server import Server
from ._wire import GENERATE, GenerateRequest, decode_turn, error_of, words_of


@attrs.frozen(kw_only=True)
class Call:
    """One try: where it goes, under which rid, and what the server's weights were called when it was sent."""

    server: Server
    rid: str
    request: GenerateRequest
    named: Named

    @property
    def attempted(self) -> str:
        """Who was asked for what: the beginning of every error message about it."""
        return f"POST {self.server.url}{GENERATE} {self.rid}"

    def turn_of(self, response: Response) -> Turn:
        """The answer as a Turn.

        Raises:
          RequestRejected, ServerBusy, ServerError: it is none; in the server's words.

        """
        if response.status != 200:  # noqa: PLR2004
            raise self.error(response)
        return decode_turn(
            response.body,
            attempted=self.attempted,
            rid=self.rid,
            request=self.request,
            version_of=lambda name: self.server.naming.version_of(name, self.named),
        )

    def error(self, response: Response) -> ServerError:
        """The exception for an answer with an error status."""
        retry_after = response.header(b"retry-after")
        return error_of(self.attempted, response.status, words_of(response.body), retry_after=retry_after)

"""``/generate`` and the answers it can give: whole or streamed, one or many."""

from typing import Any, final

import attrs
import msgspec
import trio

from .._http.server import Emit, ServerConnection
from .._http.server_reader import Request as HttpRequest
from ._answers import Answers, Chunks
from ._body import decode_generate
from ._call import Call, unfold
from ._frontend import Frontend
from ._refusal import Refusal, unavailable
from ._scheduler.request import Request

_DONE = b"[DONE]"


@final
@attrs.frozen(kw_only=True, eq=False)
class Generate:
    """Answers ``/generate`` calls."""

    frontend: Frontend
    answers: Answers

    async def __call__(self, connection: ServerConnection, request: HttpRequest) -> None:
        """Answer one call.

        Raises:
          Refusal: it is answered with an error.
          ClientGone: there is nobody to answer.

        """
        body = decode_generate(request.body)
        if body.stream:

            async def stream(emit: Emit) -> None:
                try:
                    await self._stream(unfold(body, self.frontend.submission.new_rid), emit)
                except Refusal as refusal:
                    await emit(msgspec.json.encode(refusal.chunk))
                await emit(_DONE)

            await connection.events(stream)
            return
        answer = await self._whole(unfold(body, self.frontend.submission.new_rid), connection.gone)
        await connection.reply_json(200, answer)

    async def _whole(self, call: Call, gone: trio.Event) -> Any:
        async with self.frontend.admitted(call) as lives:
            for live in lives:
                _raise_for(await self.frontend.finished(live, gone))
            now = trio.current_time()
            answers = [self.answers.final(live, now) for live in lives]
        return answers if call.many else answers[0]

    async def _stream(self, call: Call, emit: Emit) -> None:
        async with self.frontend.admitted(call) as lives:
            chunks = [Chunks(live, self.answers, incremental=self.frontend.settings.incremental) for live in lives]
            numbered = list(enumerate(chunks))
            while numbered:
                await lives[0].bell.wait()
                for index, one in numbered:
                    chunk = one.next(trio.current_time())
                    if chunk is not None:
                        await emit(msgspec.json.encode(chunk | {"index": index} if call.many else chunk))
                numbered = [(index, one) for index, one in numbered if not one.over]


def _raise_for(request: Request) -> None:
    """The scheduler gave the request up with a status: an HTTP error."""
    finish = request.finish or {}
    if finish.get("status_code"):
        raise unavailable(str(finish["message"]), int(finish["status_code"]))

"""``/generate`` and the answers it can give: whole or streamed, one or many."""

from typing import Any, final

import attrs
import trio

from ._answers import Answers, Deltas
from ._body import decode_generate
from ._call import Call, unfold
from ._connection import Connection, Emit, HttpRequest
from ._frontend import Frontend
from ._refusal import Refusal, unavailable
from ._registry import Live
from ._request import Request


@final
@attrs.frozen(kw_only=True, eq=False)
class Generate:
    """Answers ``/generate`` calls."""

    frontend: Frontend
    answers: Answers

    async def __call__(self, connection: Connection, request: HttpRequest) -> None:
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
                    await emit(refusal.chunk)

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
            if not call.many:
                await self._chunks(lives[0], emit)
                return
            async with trio.open_nursery() as nursery:
                lock = trio.Lock()
                for index, live in enumerate(lives):
                    nursery.start_soon(self._indexed_chunks, index, live, emit, lock)

    async def _indexed_chunks(self, index: int, live: Live, emit: Emit, lock: trio.Lock) -> None:
        async def numbered(answer: dict[str, Any]) -> None:
            async with lock:  # one event at a time: they share a connection
                await emit(answer | {"index": index})

        await self._chunks(live, numbered)

    async def _chunks(self, live: Live, emit: Emit) -> None:
        """Everything that is new since the last chunk, until the end; several steps may share a chunk."""
        deltas = Deltas() if self.frontend.settings.incremental else None
        while not live.ended.is_set():
            await live.changed.wait()
            if live.ended.is_set():
                break
            live.changed = trio.Event()
            answer = self.answers.partial(live)
            if answer is not None:
                await emit(deltas.cut(answer) if deltas else answer)
        answer = self.answers.final(live, trio.current_time())
        await emit(deltas.cut(answer) if deltas else answer)


def _raise_for(request: Request) -> None:
    """The scheduler gave the request up with a status: an HTTP error."""
    finish = request.finish or {}
    if finish.get("status_code"):
        raise unavailable(str(finish["message"]), int(finish["status_code"]))

"""FakeSGLang: a scripted SGLang server on a real local socket, for tests of what crosses the wire.

It keeps the contract that the client relies on, with its quirks (an abort is always answered 200, requests are parked
silently while paused, the abort of a parked request is lost, a closed socket frees its slot only after seconds), but has no
model: its answers are a function of the prompt. Faults are planned, one action for each request::

    async with open_fake_sglang([Fault.RESET, Reply(status=503, headers={"retry-after": "1"}), Run()]) as fake:
        async with open_sglang_servers([fake.url]) as servers:
            ...

Tests wait for a state with ``await fake.until(lambda: fake.in_flight == 3)``, never for time to pass.
"""

import json
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, final

import attrs
import trio

from ..._http.server import ServerConnection
from ..._http.server_reader import Request as HttpRequest
from ..._util.condition import Condition
from ..._util.service import open_service
from .answers import EventStream, Running, reset, send_answer
from .plan import Action, Fault, Plan, Reply, Run, Seen, action_of

_DEFAULT_TOKENS = 128


@final
@attrs.define(eq=False, repr=False)
class FakeSGLang:
    """One fake server. ``serve`` answers one connection over any Trio stream; ``open_fake_sglang`` listens on a port.

    ``plan`` may be replaced at any time. ``disconnect_s``: seconds that a request runs on after its socket was closed;
    ``drip_s``: seconds between two bytes of ``Fault.DRIP``.
    """

    plan: Plan = ()
    url: str = ""
    incremental: bool = False
    """Each event of a stream has only what is new, as with ``--incremental-streaming-output``."""
    prefix: str = ""
    """The path in front of every route."""
    disconnect_s: float = 3.0
    drip_s: float = 0.01
    seen: list[Seen] = attrs.field(factory=list, init=False)
    """Every request, in the order of arrival."""
    accepted: int = attrs.field(default=0, init=False)
    """The number of connections ever opened."""
    mode: str | None = attrs.field(default=None, init=False)
    """The mode of the present pause, or None."""
    _scopes: dict[int, trio.CancelScope] = attrs.field(factory=dict, init=False)
    _version: str = attrs.field(default="default", init=False)
    _running: dict[str, Running] = attrs.field(factory=dict, init=False)
    _counts: Counter[str] = attrs.field(factory=Counter, init=False)
    _changed: Condition = attrs.field(factory=Condition, init=False)

    def __repr__(self) -> str:
        return f"<FakeSGLang {self.url}: {self.in_flight} requests on {self.connections} connections>"

    @property
    def connections(self) -> int:
        """The number of open connections."""
        return len(self._scopes)

    @property
    def in_flight(self) -> int:
        """The number of requests that are generated or held."""
        return len(self._running)

    @property
    def scheduled(self) -> int:
        """The number of requests that ``/v1/loads`` tells of: as in SGLang without those that a pause has parked."""
        return sum(not running.parked for running in self._running.values())

    @property
    def paused(self) -> bool:
        """True from a pause to the next continue."""
        return self.mode is not None

    @property
    def aborts(self) -> list[str]:
        """Request ids of the aborts so far, in order; ``""`` for an abort of everything."""
        return [seen.rid or "" for seen in self.seen if seen.path == "/abort_request"]

    @property
    def generates(self) -> list[str]:
        """Request ids of the generate requests so far, in order."""
        return [seen.rid or "" for seen in self.seen if seen.path == "/generate"]

    @property
    def version(self) -> str:
        """The name of the weights. Setting it ends a span of every running request."""
        return self._version

    @version.setter
    def version(self, name: str) -> None:
        for running in self._running.values():
            running.spans.append((self._version, running.so_far))
        self._version = name

    def abort(self, rid: str, *, everything: bool = False) -> None:
        """End the requests whose id begins with ``rid``, or all. As in SGLang, lost for those that arrived while paused."""
        for running in self._running.values():
            if not (everything or (rid and running.rid.startswith(rid))):
                continue
            if running.parked:
                running.deaf = True
            elif self.paused and self.mode != "abort":
                running.abort_later = True
            elif not running.deaf:
                running.scope.cancel()

    def pause(self, mode: str) -> None:
        """Pause: ``abort`` ends what runs, ``retract`` and ``in_place`` keep it until the continue."""
        self.mode = mode
        if mode == "abort":
            self.abort("", everything=True)

    def resume(self) -> None:
        """Continue after a pause."""
        self.mode = None
        self._changed.notify()
        for running in self._running.values():
            if running.abort_later:
                running.scope.cancel()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition holds; it is evaluated whenever something happens on this server."""
        await self._changed.wait_until(condition)

    def kill(self) -> None:
        """Reset every connection and forget every request, as when the process dies; a new one may answer at once."""
        for scope in self._scopes.values():
            scope.cancel()
        self.resume()

    async def serve(self, stream: trio.abc.Stream) -> None:
        """Answer the requests of one connection until it ends."""
        self.accepted += 1
        number = self.accepted
        scope = self._scopes[number] = trio.CancelScope()
        self._changed.notify()
        try:
            with scope:
                await ServerConnection(stream).serve(partial(self._respond, number))
        finally:
            del self._scopes[number]
            self._changed.notify()
            if scope.cancelled_caught:
                await reset(stream)  # noqa: ASYNC102  closes without waiting for anybody
            await trio.aclose_forcefully(stream)  # noqa: ASYNC102  made for this place

    async def _respond(self, number: int, connection: ServerConnection, request: HttpRequest) -> None:
        try:
            body = json.loads(request.body or b"{}")
        except ValueError:
            await self._send(connection, Reply(status=400, body={"object": "error", "message": "Invalid JSON"}))
            return
        seen = self._note(number, request, body)
        action = action_of(self.plan, seen)
        if isinstance(action, Reply):
            await self._send(connection, action, Fault.CHUNKED if action.chunked else None)
        elif action is Fault.RESET:
            await reset(connection.stream)
        elif action is Fault.CLOSE:
            connection.keep_open = False
        elif seen.path == "/generate":
            await self._generate(connection, seen, action)
        elif action is Fault.HANG:
            await connection.gone.wait()
        else:
            reply = Reply() if action is Fault.IGNORE else control(self, seen.path, seen.body)
            self._changed.notify()
            await self._send(connection, reply, action if isinstance(action, Fault) else None)

    def _note(self, number: int, request: HttpRequest, body: object) -> Seen:
        path = request.path.removeprefix(self.prefix)
        rid = body.get("rid") if isinstance(body, dict) else None
        seen = Seen(
            path=path,
            number=self._counts[path],
            rid=rid if isinstance(rid, str) else None,
            body=body if isinstance(body, dict) else {},
            headers={name.decode("latin-1").lower(): value.decode("latin-1") for name, value in request.headers},
            connection=number,
            time=trio.current_time(),
        )
        self._counts[path] += 1
        self.seen.append(seen)
        self._changed.notify()
        return seen

    async def _send(self, connection: ServerConnection, reply: Reply, fault: Fault | None = None) -> None:
        await send_answer(connection, reply, fault, drip_s=self.drip_s)

    async def _generate(self, connection: ServerConnection, seen: Seen, action: Action) -> None:
        running = self._admit(seen, action)
        if isinstance(running, Reply):
            await self._send(connection, running)
            return
        fault = action.fault if isinstance(action, Run) else action if isinstance(action, Fault) else None
        events = EventStream(connection, running, self.incremental, fault)
        streamed = events if seen.body.get("stream") is True else None
        self._running[running.rid] = running
        self._changed.notify()
        try:
            left = await self._run_until_disconnect(connection, running, fault, streamed)
        finally:
            del self._running[running.rid]
            self._changed.notify()
        if left:
            connection.keep_open = False
        elif streamed is not None:
            await streamed.end(self._version)
        else:
            body = json.dumps(running.answer(self._version, fault)).encode()
            await self._send(connection, Reply(body=body[:-9] if fault is Fault.MALFORMED_JSON else body), fault)

    async def _run_until_disconnect(
        self, connection: ServerConnection, running: Running, fault: Fault | None, streamed: EventStream | None
    ) -> bool:
        """Run the request; return True if it was dropped because its client has left."""
        left = True
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._drop_after_disconnect, connection, running, nursery.cancel_scope)
            with running.scope:
                await self._run(running, fault, streamed)
            running.aborted = running.scope.cancelled_caught
            left = False
            nursery.cancel_scope.cancel()
        return left

    def _admit(self, seen: Seen, action: Action) -> Running | Reply:
        ids, text = seen.body.get("input_ids"), seen.body.get("text")
        sampling = seen.body.get("sampling_params")
        wanted = sampling.get("max_new_tokens", _DEFAULT_TOKENS) if isinstance(sampling, dict) else _DEFAULT_TOKENS
        prompt = list(ids) if isinstance(ids, list) else [ord(letter) for letter in str(text)]
        if ids is None and text is None:
            return Reply(status=400, body={"error": {"message": "Either text or input_ids should be provided."}})
        rid = seen.rid or f"made-up-{seen.number}"
        if rid in self._running:
            return Reply(status=400, body={"error": {"message": f"Duplicate request ID detected: {rid}"}})
        return Running(
            rid, prompt, int(wanted), action if isinstance(action, Run) else None, text=ids is None, parked=self.paused
        )

    async def _run(self, running: Running, fault: Fault | None, streamed: EventStream | None) -> None:
        await self._while_paused()
        running.parked = False
        if streamed is not None:
            with trio.CancelScope(shield=True):  # an abort must not cut an event in two
                await streamed.begin(self._version)
        if fault is Fault.HANG:
            running.deaf = True
            await trio.sleep_forever()
        if running.run is not None:
            await (trio.Event() if running.run.until is None else running.run.until).wait()
        await self._while_paused()

    async def _while_paused(self) -> None:
        if self.paused:
            await self._changed.wait_until(lambda: not self.paused)

    async def _drop_after_disconnect(
        self, connection: ServerConnection, running: Running, scope: trio.CancelScope
    ) -> None:
        await connection.gone.wait()
        if not running.parked:
            await trio.sleep(self.disconnect_s)
        scope.cancel()


@asynccontextmanager
async def open_fake_sglang(
    plan: Plan = (), *, version: str = "default", disconnect_s: float = 3.0, drip_s: float = 0.01, port: int = 0
) -> AsyncGenerator[FakeSGLang]:
    """Run a FakeSGLang on a local port, given by its ``url``. Leaving ends the server and every request on it."""
    fake = FakeSGLang(plan, disconnect_s=disconnect_s, drip_s=drip_s)
    fake.version = version

    async def listen(*, task_status: trio.TaskStatus[Any]) -> None:  # noqa: ASYNC128  serve_tcp calls started()
        await trio.serve_tcp(fake.serve, port, host="127.0.0.1", task_status=task_status)

    async with open_service(listen) as listeners:
        fake.url = f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}"
        yield fake


def control(fake: FakeSGLang, path: str, body: Mapping[str, object]) -> Reply:
    """Carry out a control call, and return its answer."""
    match path:
        case "/abort_request":
            fake.abort(str(body.get("rid") or ""), everything=bool(body.get("abort_all")))
        case "/pause_generation":
            fake.pause(str(body.get("mode", "abort")))
        case "/continue_generation":
            fake.resume()
        case "/flush_cache":
            busy = fake.in_flight and fake.mode != "retract"
            return Reply(status=400, body=b"Flush cache failed.\n") if busy else Reply(body=b"Cache flushed.\n")
        case "/update_weight_version":
            fake.version = str(body.get("new_version"))
        case "/update_weights_from_disk":
            fake.version = str(body.get("weight_version") or fake.version)
        case _:
            return _info(fake, path)
    return Reply() if path == "/abort_request" else Reply(body={"status": "ok", "success": True})


def _info(fake: FakeSGLang, path: str) -> Reply:
    match path:
        case "/ready" | "/ping":
            return Reply(status=503 if fake.paused and path == "/ready" else 200)
        case "/health" | "/health_generate":
            return Reply(status=503 if fake.paused else 200)
        case "/model_info" | "/get_model_info":
            return Reply(body={"model_path": "fake", "is_generation": True, "weight_version": fake.version})
        case "/server_info" | "/get_server_info":
            return Reply(body={"version": "fake", "incremental_streaming_output": fake.incremental})
        case "/v1/loads":
            load = {"dp_rank": 0, "num_running_reqs": fake.scheduled, "num_waiting_reqs": 0}
            return Reply(body={"timestamp": trio.current_time(), "loads": [load]})
        case _:
            return Reply(status=404, body={"detail": "Not Found"})

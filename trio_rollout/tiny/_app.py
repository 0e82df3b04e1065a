"""The HTTP side of a tiny server except ``/generate``: its routes, control calls, description, and failures as answers.

``/separate_reasoning`` works as SGLang's parsers qwen3 and deepseek-r1; ``/parse_function_call`` as its parser qwen25, whose
format the shipped chat template has.
"""

import json
import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from typing import Any, TypeAlias, TypeVar, final

import attrs
import msgspec
import trio

from .._http.server import ClientGone, ServerConnection
from .._http.server_reader import Request as HttpRequest
from .._util.time import wait_s
from ._body import Refusal, SamplingBody, malformed
from ._call import Call, Item
from ._frontend import Frontend
from ._generate import Generate
from ._model.model import TinyModel
from ._model.tokenizer import DATA
from ._scheduler.request import Wanted

_LOGGER = logging.getLogger("trio_rollout.tiny")
VERSION = "0.5.23"
"""The SGLang version whose protocol this is; clients choose by it how to talk."""

_THINK_BEGIN, _THINK_END = "<think>", "</think>"
# True for a format whose answers begin inside the thoughts: the chat template has written the opening mark.
REASONING_PARSERS = {"qwen3": False, "qwen3-thinking": True, "deepseek-r1": True}
"""SGLang's names of the format."""


def separate_reasoning(text: str, *, begins_inside: bool) -> dict[str, str]:
    """Return the thoughts and the text behind them; thoughts without an end were cut off."""
    if not (begins_inside or _THINK_BEGIN in text):
        return {"reasoning_text": "", "text": text}
    thoughts, _, rest = text.removeprefix(_THINK_BEGIN).partition(_THINK_END)
    return {"reasoning_text": thoughts, "text": rest}


_CALL_BEGIN = "<tool_call>\n"
_BLOCK = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)
PARSERS = frozenset({"qwen25", "qwen"})
"""SGLang's names of the format."""


class _Function(msgspec.Struct):
    name: str


class _Tool(msgspec.Struct):
    """A tool that the model may call, as in OpenAI's API."""

    function: _Function


def parse_tool_calls(text: str, tools: list[_Tool]) -> dict[str, Any]:
    """Return the text before the first call, and the calls of known tools; a block that is not JSON is left out."""
    if not tools or _CALL_BEGIN not in text:
        return {"normal_text": text, "calls": []}
    places = {tool.function.name: place for place, tool in enumerate(tools)}
    calls = []
    for block in _BLOCK.findall(text):
        try:
            written = json.loads(block.strip())
        except json.JSONDecodeError as error:
            _LOGGER.warning("a tool call is not JSON: %s", error)
            continue
        for action in written if isinstance(written, list) else [written]:
            calls.extend(_call(action, places))
    return {"normal_text": text[: text.find(_CALL_BEGIN)].strip(), "calls": calls}


def _call(action: Any, places: dict[str, int]) -> list[dict[str, Any]]:
    name = action.get("name") if isinstance(action, dict) else None
    if name not in places:
        _LOGGER.warning("a call to a tool that does not exist: %s", name)
        return []
    arguments = action.get("parameters") or action.get("arguments", {})
    return [{"tool_index": places[name], "name": name, "parameters": json.dumps(arguments, ensure_ascii=False)}]


B = TypeVar("B", bound=msgspec.Struct)
Handler: TypeAlias = Callable[[ServerConnection, HttpRequest], Awaitable[None]]

_GET = frozenset({"GET", "HEAD"})
_POST = frozenset({"POST"})
_EITHER = frozenset({"GET", "POST"})
_TEXT = "text/plain; charset=utf-8"
_FLUSHED = (
    "Cache flushed.\nPlease check backend logs for more details. "
    "(When there are running or waiting requests, the operation will not be performed.)\n"
)
_NOT_FLUSHED = (
    "Weights were updated, but the cache was not flushed because requests are still running or queued. "
    "Retract or finish them, then call /flush_cache."
)
_HEALTH_INTERVAL = 1.0


class _Abort(msgspec.Struct):
    rid: str | None = ""
    abort_all: bool | None = False


class _Pause(msgspec.Struct):
    mode: str = "abort"


class _Continue(msgspec.Struct):
    torch_empty_cache: bool | None = True


class _FromDisk(msgspec.Struct):
    model_path: str
    load_format: str | None = None
    weight_version: str | None = None
    abort_all_requests: bool = False
    flush_cache: bool = True


class _Version(msgspec.Struct):
    new_version: str
    abort_all_requests: bool = True


class _SlowDown(msgspec.Struct):
    forward_sleep_time: float | None = None


class _ParseCalls(msgspec.Struct, kw_only=True):
    text: str
    tools: list[_Tool] = []
    tool_call_parser: str | None = None


class _SeparateReasoning(msgspec.Struct, kw_only=True):
    text: str
    reasoning_parser: str


def decode(request: HttpRequest, kind: type[B]) -> B:
    """Decode the JSON body of a control call.

    Raises:
      Refusal: there is no body, or it has another form.
    """
    try:
        return msgspec.json.decode(request.body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise malformed(f"body: {error}") from error


@final
@attrs.define(kw_only=True, eq=False, repr=False)
class App:
    """Finds the handler of a request, and answers for a handler that fails."""

    generate: Generate
    frontend: Frontend
    model_path: str
    """The folder that the server names as its model. A weight update from disk changes it, as in SGLang."""
    named_version: str | None = None
    """The version that the server names as its own, where tokens name a newer one: a push that could not flush does not change it."""
    healthy: bool = True
    _routes: Mapping[str, tuple[frozenset[str], Handler]] = attrs.field(
        init=False, default=attrs.Factory(lambda app: app._table(), takes_self=True)
    )

    def _table(self) -> Mapping[str, tuple[frozenset[str], Handler]]:
        return {
            "/generate": (frozenset({"POST", "PUT"}), self.generate),
            "/abort_request": (_POST, self._abort),
            "/pause_generation": (_POST, self._pause),
            "/continue_generation": (_POST, self._resume),
            "/update_weights_from_disk": (_POST, self._update_from_disk),
            "/update_weight_version": (_POST, self._update_version),
            "/flush_cache": (_EITHER, self._flush),
            "/release_memory_occupation": (_EITHER, self._nothing),
            "/resume_memory_occupation": (_EITHER, self._nothing),
            "/parse_function_call": (_POST, self._parse_function_call),
            "/separate_reasoning": (_POST, self._separate_reasoning),
            "/slow_down": (_EITHER, self._slow_down),
            "/ready": (_GET, self._ready),
            "/ping": (_GET, self._ping),
            "/health": (_GET, self._health),
            "/health_generate": (_GET, self._health),
            "/model_info": (_GET, self._model_info),
            "/get_model_info": (_GET, self._model_info),
            "/server_info": (_GET, self._server_info),
            "/get_server_info": (_GET, self._server_info),
            "/v1/loads": (_GET, self._loads),
            "/v1/models": (_GET, self._models),
            "/": (_GET, self._root),
        }

    async def answer(self, connection: ServerConnection, request: HttpRequest) -> None:
        """Answer one request."""
        methods, handler = self._routes.get(request.path, (frozenset[str](), self._root))
        if not methods:
            await connection.reply_json(404, {"detail": "Not Found"})
        elif request.method not in methods:
            await connection.reply_json(405, {"detail": "Method Not Allowed"})
        else:
            await self._guarded(handler, connection, request)

    async def _guarded(self, handler: Handler, connection: ServerConnection, request: HttpRequest) -> None:
        try:
            await handler(connection, request)
        except Refusal as refusal:
            await connection.reply_json(refusal.status, refusal.body)
        except (ClientGone, trio.BrokenResourceError, trio.ClosedResourceError):
            raise
        except Exception:
            if connection.in_stream:
                raise
            _LOGGER.exception("%s %s failed", request.method, request.path)
            await connection.reply(500, b"Internal Server Error", _TEXT)

    async def _abort(self, connection: ServerConnection, request: HttpRequest) -> None:
        """Abort one rid or all; always answered 200 at once."""
        body = decode(request, _Abort)
        self.frontend.abort(body.rid or "", everything=bool(body.abort_all))
        await connection.reply(200)

    async def _pause(self, connection: ServerConnection, request: HttpRequest) -> None:
        mode = decode(request, _Pause).mode
        if mode not in {"abort", "retract", "in_place"}:
            raise malformed(f"mode must be 'abort', 'retract' or 'in_place', got {mode!r}")
        await self.frontend.pause(mode=mode)
        await connection.reply_json(200, {"message": "Generation paused successfully.", "status": "ok"})

    async def _resume(self, connection: ServerConnection, request: HttpRequest) -> None:
        decode(request, _Continue)
        await self.frontend.resume()
        await connection.reply_json(200, {"message": "Generation continued successfully.", "status": "ok"})

    async def _flush(self, connection: ServerConnection, request: HttpRequest) -> None:
        try:
            patience = float(request.query.get("timeout", "0"))
        except ValueError as error:
            raise malformed(f"timeout: {error}") from error
        failure = await self.frontend.flush(max(patience, 0.0))
        await connection.reply(400 if failure else 200, (failure or _FLUSHED).encode(), _TEXT)

    async def _update_from_disk(self, connection: ServerConnection, request: HttpRequest) -> None:
        """Load weights: at once when paused, otherwise when nothing is in flight, with new requests queued behind the update."""
        body = decode(request, _FromDisk)
        if body.abort_all_requests:
            self.frontend.abort(everything=True)
        success, message = await self._update(body)
        status = 200 if success else 400
        await connection.reply_json(status, {"success": success, "message": message, "num_paused_requests": 0})

    async def _update(self, body: _FromDisk) -> tuple[bool, str]:
        try:
            model = TinyModel.load(body.model_path, like=self.frontend.scheduler.model)
        except (OSError, ValueError) as error:
            return False, f"Failed to update weights from {body.model_path}: {error}. Rolling back to original weights."
        before = self.named_version or self.frontend.scheduler.version
        flushed = await self.frontend.update_weights(model, body.weight_version, flush=body.flush_cache)
        self.named_version = None if flushed else before
        if not flushed:
            return False, _NOT_FLUSHED
        self.model_path = body.model_path
        tail = "" if body.weight_version is None else f" Weight version updated to {body.weight_version}."
        return True, "Succeeded to update model weights." + tail

    async def _update_version(self, connection: ServerConnection, request: HttpRequest) -> None:
        """Rename the weights; aborts every request unless told not to."""
        body = decode(request, _Version)
        if body.abort_all_requests:
            self.frontend.abort(everything=True)
        version = body.new_version
        self.frontend.scheduler.set_version(version)
        self.named_version = None
        answer = {"success": True, "message": f"Weight version updated to {version}", "new_version": version}
        await connection.reply_json(200, answer)

    async def _nothing(self, connection: ServerConnection, _request: HttpRequest) -> None:
        """Answer the memory calls, which do nothing on a CPU."""
        await connection.reply_json(200, None)

    async def _parse_function_call(self, connection: ServerConnection, request: HttpRequest) -> None:
        """Find the tool calls in a text. An unknown parser is answered with a 500, as in SGLang."""
        body = decode(request, _ParseCalls)
        if body.tool_call_parser not in PARSERS:
            raise ValueError(f"Unsupported tool_call_parser: {body.tool_call_parser}")
        await connection.reply_json(200, parse_tool_calls(body.text, body.tools))

    async def _separate_reasoning(self, connection: ServerConnection, request: HttpRequest) -> None:
        """Separate the thoughts from a text. An unknown parser is answered with a 500, as in SGLang."""
        body = decode(request, _SeparateReasoning)
        if body.reasoning_parser not in REASONING_PARSERS:
            raise ValueError(f"Unsupported model type: {body.reasoning_parser}")
        inside = REASONING_PARSERS[body.reasoning_parser]
        await connection.reply_json(200, separate_reasoning(body.text, begins_inside=inside))

    async def _slow_down(self, connection: ServerConnection, request: HttpRequest) -> None:
        """Set the seconds that are waited after every step from now on."""
        self.frontend.step_delay = decode(request, _SlowDown).forward_sleep_time or 0.0
        await connection.reply_json(200, None)

    async def _ready(self, connection: ServerConnection, _request: HttpRequest) -> None:
        """Answer 200 if new requests are accepted: the server is healthy and not paused."""
        await connection.reply(200 if self.healthy and not self.frontend.paused else 503)

    async def _ping(self, connection: ServerConnection, _request: HttpRequest) -> None:
        """Answer 200 if the server is healthy, paused or not."""
        await connection.reply(200 if self.healthy else 503)

    async def _health(self, connection: ServerConnection, _request: HttpRequest) -> None:
        """Generate one token and check once a second that the server steps; 503 after ``health_timeout``, as when paused."""
        async with trio.open_nursery() as nursery:
            if not (self.frontend.scheduler.running or self.frontend.scheduler.waiting):
                nursery.start_soon(self._probe)
            self.healthy = await self._sign_of_life()
            nursery.cancel_scope.cancel()
        await connection.reply(200 if self.healthy else 503)

    async def _sign_of_life(self) -> bool:
        steps, give_up = self.frontend.steps, trio.current_time() + self.frontend.settings.health_timeout
        while trio.current_time() < give_up:
            await wait_s(_HEALTH_INTERVAL)
            if self.frontend.steps > steps:
                return True
        return False

    async def _probe(self) -> None:
        params = SamplingBody(max_new_tokens=1, temperature=0.0)
        rid = f"HEALTH_CHECK_{self.frontend.submission.new_rid()}"
        item = Item(rid=rid, text=None, input_ids=[0], sampling=params, wanted=Wanted())
        try:
            async with self.frontend.admitted(Call(items=(item,), samples=1, many=False)) as all_active:
                await all_active[0].ended.wait()
        except Refusal:
            return  # no step will follow from this probe

    async def _model_info(self, connection: ServerConnection, _request: HttpRequest) -> None:
        info = {
            "model_path": self.model_path,
            "served_model_name": self.model_path,
            "tokenizer_path": str(DATA),
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": self.named_version or self.frontend.scheduler.version,
            "load_format": "auto",
            "reasoning_parser": self.frontend.settings.reasoning_parser,
            "tool_call_parser": "qwen25",
            "disaggregation_mode": "null",
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "model_type": "tiny_table",
            "architectures": ["TinyTableLM"],
        }
        await connection.reply_json(200, info)

    async def _server_info(self, connection: ServerConnection, _request: HttpRequest) -> None:
        settings = self.frontend.settings
        info = {
            "model_path": self.model_path,
            "tokenizer_path": str(DATA),
            "served_model_name": self.model_path,
            "tool_call_parser": "qwen25",
            "context_length": settings.context_length,
            "max_running_requests": settings.max_running,
            "max_queued_requests": settings.max_queued,
            "incremental_streaming_output": settings.incremental,
            "random_seed": settings.seed,
            "weight_version": self.named_version or self.frontend.scheduler.version,
            "device": "cpu",
            "tp_size": 1,
            "dp_size": 1,
            "max_req_input_len": settings.context_length - 1,
            "max_total_num_tokens": settings.cache_tokens,
            "internal_states": [{"effective_max_running_requests_per_dp": settings.max_running}],
            "version": VERSION,
        }
        await connection.reply_json(200, info)

    async def _loads(self, connection: ServerConnection, _request: HttpRequest) -> None:
        scheduler, settings = self.frontend.scheduler, self.frontend.settings
        load = scheduler.load if scheduler.paused else scheduler.load_now()
        room = settings.cache_tokens
        loads = {
            "timestamp": trio.current_time(),
            "dp_rank": 0,
            "num_running_reqs": load.running,
            "num_waiting_reqs": load.waiting,
            "num_used_tokens": load.used_tokens,
            "num_total_tokens": load.used_tokens,
            "num_active_tokens": load.used_tokens,
            "max_total_num_tokens": room,
            "max_running_requests": settings.max_running,
            "token_usage": load.used_tokens / room if room else 0.0,
            "gen_throughput": 0.0,
            "cache_hit_rate": 0.0,
            "utilization": load.running / settings.max_running,
            "memory": {"token_capacity": room},
            "queues": {"waiting": load.waiting, "grammar": 0, "paused": 0, "retracted": load.retracted},
        }
        answer = {
            "timestamp": datetime.fromtimestamp(trio.current_time(), UTC).isoformat(),  # of the run, not of the day
            "version": VERSION,
            "accelerator": "cpu",
            "num_accelerators": 1,
            "loads": [loads],
        }
        await connection.reply_json(200, answer)

    async def _models(self, connection: ServerConnection, _request: HttpRequest) -> None:
        longest = self.frontend.settings.context_length
        card = {"id": self.model_path, "object": "model", "created": 0, "owned_by": "sglang", "root": self.model_path}
        await connection.reply_json(200, {"object": "list", "data": [card | {"max_model_len": longest}]})

    async def _root(self, connection: ServerConnection, _request: HttpRequest) -> None:
        await connection.reply_json(200, "SGLang is running")

"""The control routes: abort, pause, weights, cache, health, and SGLang's two parsers of a model's text.

``/separate_reasoning`` works as SGLang's parsers qwen3 and deepseek-r1; ``/parse_function_call`` as its parser qwen25, whose
format the shipped chat template has.
"""

import json
import logging
import re
from typing import Any, TypeVar, final

import attrs
import msgspec
import trio

from .._http.server import ServerConnection
from .._http.server_reader import Request as HttpRequest
from .._util.time import wait_s
from ._body import SamplingBody
from ._call import Call, Item
from ._frontend import Frontend
from ._identity import Identity
from ._model.model import TinyModel
from ._refusal import Refusal, malformed
from ._scheduler.request import Wanted

_THINK_BEGIN, _THINK_END = "<think>", "</think>"
# True for a format whose answers begin inside the thoughts: the chat template has written the opening mark.
REASONING_PARSERS = {"qwen3": False, "qwen3-thinking": True, "deepseek-r1": True}
"""SGLang's names of the format."""


class SeparateBody(msgspec.Struct, kw_only=True):
    """The body of ``/separate_reasoning``."""

    text: str
    reasoning_parser: str


def separate_reasoning(text: str, *, begins_inside: bool) -> dict[str, str]:
    """Return the thoughts and the text behind them; thoughts without an end were cut off."""
    if not (begins_inside or _THINK_BEGIN in text):
        return {"reasoning_text": "", "text": text}
    thoughts, _, rest = text.removeprefix(_THINK_BEGIN).partition(_THINK_END)
    return {"reasoning_text": thoughts, "text": rest}


_LOGGER = logging.getLogger("trio_rollout.tiny")
_CALL_BEGIN = "<tool_call>\n"
_BLOCK = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)
PARSERS = frozenset({"qwen25", "qwen"})
"""SGLang's names of the format."""


class Function(msgspec.Struct):
    """A tool's name."""

    name: str


class Tool(msgspec.Struct):
    """A tool that the model may call, as in OpenAI's API."""

    function: Function


class ParseBody(msgspec.Struct, kw_only=True):
    """The body of ``/parse_function_call``."""

    text: str
    tools: list[Tool] = []
    tool_call_parser: str | None = None


def parse_tool_calls(text: str, tools: list[Tool]) -> dict[str, Any]:
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
@attrs.frozen(kw_only=True, eq=False)
class Control:
    """The handlers of control calls."""

    frontend: Frontend
    identity: Identity

    async def abort(self, connection: ServerConnection, request: HttpRequest) -> None:
        """Abort one rid or all; always answered 200 at once."""
        body = decode(request, _Abort)
        self.frontend.abort(body.rid or "", everything=bool(body.abort_all))
        await connection.reply(200)

    async def pause(self, connection: ServerConnection, request: HttpRequest) -> None:
        """Pause in mode abort, retract or in_place."""
        mode = decode(request, _Pause).mode
        if mode not in {"abort", "retract", "in_place"}:
            raise malformed(f"mode must be 'abort', 'retract' or 'in_place', got {mode!r}")
        await self.frontend.pause(mode=mode)
        await connection.reply_json(200, {"message": "Generation paused successfully.", "status": "ok"})

    async def resume(self, connection: ServerConnection, request: HttpRequest) -> None:
        """Resume after a pause."""
        decode(request, _Continue)
        await self.frontend.resume()
        await connection.reply_json(200, {"message": "Generation continued successfully.", "status": "ok"})

    async def flush(self, connection: ServerConnection, request: HttpRequest) -> None:
        """Flush the prefix cache."""
        try:
            patience = float(request.query.get("timeout", "0"))
        except ValueError as error:
            raise malformed(f"timeout: {error}") from error
        failure = await self.frontend.flush(max(patience, 0.0))
        await connection.reply(400 if failure else 200, (failure or _FLUSHED).encode(), _TEXT)

    async def update_from_disk(self, connection: ServerConnection, request: HttpRequest) -> None:
        """Load weights: at once when paused, otherwise when nothing is in flight, with new requests queued behind the update."""
        body = decode(request, _FromDisk)
        if body.abort_all_requests:
            self.frontend.abort(everything=True)
        success, message = await self._update(body)
        status = 200 if success else 400
        await connection.reply_json(status, {"success": success, "message": message, "num_paused_requests": 0})

    async def _update(self, body: _FromDisk) -> tuple[bool, str]:
        old = self.frontend.scheduler.model
        try:
            model = TinyModel.load(body.model_path, like=old)
        except (OSError, ValueError) as error:
            return False, f"Failed to update weights from {body.model_path}: {error}. Rolling back to original weights."
        flushed = await self.frontend.update_weights(model, body.weight_version, flush=body.flush_cache)
        if not flushed:
            return False, _NOT_FLUSHED
        self.identity.model_path = self.identity.served_model_name = body.model_path
        tail = "" if body.weight_version is None else f" Weight version updated to {body.weight_version}."
        return True, "Succeeded to update model weights." + tail

    async def update_version(self, connection: ServerConnection, request: HttpRequest) -> None:
        """Rename the weights; aborts every request unless told not to."""
        body = decode(request, _Version)
        if body.abort_all_requests:
            self.frontend.abort(everything=True)
        self.frontend.scheduler.set_version(body.new_version)
        version = body.new_version
        answer = {"success": True, "message": f"Weight version updated to {version}", "new_version": version}
        await connection.reply_json(200, answer)

    async def nothing(self, connection: ServerConnection, request: HttpRequest) -> None:
        """Answer the memory calls, which do nothing on a CPU."""
        del request
        await connection.reply_json(200, None)

    async def parse_function_call(self, connection: ServerConnection, request: HttpRequest) -> None:
        """Find the tool calls in a text. The parser must be named, as in ``/model_info``.

        Raises:
          ValueError: the parser is unknown; SGLang answers with a 500.

        """
        body = decode(request, ParseBody)
        if body.tool_call_parser not in PARSERS:
            raise ValueError(f"Unsupported tool_call_parser: {body.tool_call_parser}")
        await connection.reply_json(200, parse_tool_calls(body.text, body.tools))

    async def separate_reasoning(self, connection: ServerConnection, request: HttpRequest) -> None:
        """Separate the thoughts from a text. The parser must be named, as in ``/model_info``.

        Raises:
          ValueError: the parser is unknown; SGLang answers with a 500.

        """
        body = decode(request, SeparateBody)
        if body.reasoning_parser not in REASONING_PARSERS:
            raise ValueError(f"Unsupported model type: {body.reasoning_parser}")
        inside = REASONING_PARSERS[body.reasoning_parser]
        await connection.reply_json(200, separate_reasoning(body.text, begins_inside=inside))

    async def slow_down(self, connection: ServerConnection, request: HttpRequest) -> None:
        """Set the seconds that are waited after every step from now on."""
        self.frontend.step_delay = decode(request, _SlowDown).forward_sleep_time or 0.0
        await connection.reply_json(200, None)

    async def ready(self, connection: ServerConnection, request: HttpRequest) -> None:
        """Answer 200 if new requests are accepted: the server is healthy and not paused."""
        del request
        await connection.reply(200 if self.identity.healthy and not self.frontend.paused else 503)

    async def ping(self, connection: ServerConnection, request: HttpRequest) -> None:
        """Answer 200 if the server is healthy, paused or not."""
        del request
        await connection.reply(200 if self.identity.healthy else 503)

    async def health(self, connection: ServerConnection, request: HttpRequest) -> None:
        """Generate one token and check once a second that the server steps; 503 after ``health_timeout``, as when paused."""
        del request
        async with trio.open_nursery() as nursery:
            if not self.frontend.is_busy:
                nursery.start_soon(self._probe)
            alive = await self._sign_of_life()
            nursery.cancel_scope.cancel()
        self.identity.healthy = alive
        await connection.reply(200 if alive else 503)

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
            async with self.frontend.admitted(Call(items=(item,), samples=1, many=False, stream=False)) as all_active:
                await all_active[0].ended.wait()
        except Refusal:
            return  # no step will follow from this probe

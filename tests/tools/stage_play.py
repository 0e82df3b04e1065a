"""A tool, hooks and a listener for the tests of dispatch, each stage of which can be held up."""

import attrs
import trio

from trio_rollout.tools import Continue, FunctionOutput, Tool, ToolCall, ToolName, ToolRuntime, TurnCancellation


@attrs.define(eq=False)
class Gates:
    """The stages of a call; a stage that has an event waits for it."""

    ready: trio.Event | None = None
    start: trio.Event | None = None
    pre: trio.Event | None = None
    handler: trio.Event | None = None
    post: trio.Event | None = None
    finish: trio.Event | None = None
    reached: list[str] = attrs.field(factory=list)
    _news: trio.Event = attrs.field(factory=trio.Event)

    @classmethod
    def holding(cls, *stages):
        return cls(**{stage: trio.Event() for stage in stages})

    async def pass_(self, stage):
        self.reached.append(stage)
        self._news.set()
        self._news = trio.Event()
        event = getattr(self, stage)
        if event is not None:
            await event.wait()

    async def wait_reached(self, stage):
        with trio.fail_after(1000):
            while stage not in self.reached:
                await self._news.wait()


class PlayTool(Tool):
    """A tool that passes its stages and answers."""

    def __init__(self, gates=None, *, name="play", answer="ok", shares=True, namespace=None):
        self.name = ToolName(name, namespace)
        self.supports_parallel = shares
        self.gates = gates or Gates()
        self.answer = answer
        self.seen = []

    async def wait_until_ready(self):
        await self.gates.pass_("ready")

    async def handle(self, invocation):
        self.seen.append(invocation.payload)
        await self.gates.pass_("handler")
        if isinstance(self.answer, Exception):
            raise self.answer
        return FunctionOutput(text=self.answer) if isinstance(self.answer, str) else self.answer


class Record:
    """A listener that records its calls."""

    def __init__(self, gates=None):
        self.gates = gates or Gates()
        self.events = []

    async def on_tool_start(self, _call):
        self.events.append("start")
        await self.gates.pass_("start")

    async def on_tool_finish(self, _call, outcome):
        self.events.append(outcome)
        await self.gates.pass_("finish")


class PlayHooks:
    """Hooks with given decisions."""

    def __init__(self, gates=None, pre=None, post=None):
        self.gates = gates or Gates()
        self.pre, self.post = pre or Continue(), post or Continue()
        self.seen = []

    async def pre_tool_use(self, _invocation, payload):
        self.seen.append(("pre", payload))
        await self.gates.pass_("pre")
        return self.pre

    async def post_tool_use(self, _invocation, payload, _output):
        self.seen.append(("post", payload))
        await self.gates.pass_("post")
        return self.post


class Play:
    """One runtime with one tool, and a record of everything that happened."""

    def __init__(self, *, hold=(), hooks=True, answer="ok", tools=(), pre=None, post=None):
        self.gates = Gates.holding(*hold)
        self.tool = PlayTool(self.gates, answer=answer)
        self.record = Record(self.gates)
        self.hooks = PlayHooks(self.gates, pre, post) if hooks else None
        self.turn = TurnCancellation()
        self.timings = []
        self.runtime = ToolRuntime(
            (self.tool, *tools),
            listeners=[self.record],
            hooks=self.hooks,
            on_timing=lambda call, timing: self.timings.append((call.call_id, timing)),
        )

    @property
    def events(self):
        return self.record.events

    async def call(self, name="play", call_id="1", payload=None):
        call = ToolCall(call_id=call_id, name=ToolName(name), payload={} if payload is None else payload)
        return await self.runtime.call(call, turn=self.turn)

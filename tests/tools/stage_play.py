"""A tool, hooks and a listener for the tests of dispatch, each stage of which can be held up."""

import attrs
import trio

from trio_rollout.tools import Continue, FunctionOutput, Tool, ToolCall, ToolName, ToolRuntime, TurnCancellation


@attrs.define(eq=False)
class Stages:
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

    def __init__(self, stages=None, *, name="play", answer="ok", shares=True, namespace=None):
        self.name = ToolName(name, namespace)
        self.supports_parallel = shares
        self.stages = stages or Stages()
        self.answer = answer
        self.seen = []

    async def wait_until_ready(self):
        await self.stages.pass_("ready")

    async def handle(self, invocation):
        self.seen.append(invocation.payload)
        await self.stages.pass_("handler")
        if isinstance(self.answer, Exception):
            raise self.answer
        return FunctionOutput(text=self.answer) if isinstance(self.answer, str) else self.answer


class Recorder:
    """A listener that records its calls."""

    def __init__(self, stages=None):
        self.stages = stages or Stages()
        self.events = []

    async def on_tool_start(self, _call):
        self.events.append("start")
        await self.stages.pass_("start")

    async def on_tool_finish(self, _call, outcome):
        self.events.append(outcome)
        await self.stages.pass_("finish")


class PlayHooks:
    """Hooks with given decisions."""

    def __init__(self, stages=None, pre=None, post=None):
        self.stages = stages or Stages()
        self.pre, self.post = pre or Continue(), post or Continue()
        self.seen = []

    async def pre_tool_use(self, _invocation, payload):
        self.seen.append(("pre", payload))
        await self.stages.pass_("pre")
        return self.pre

    async def post_tool_use(self, _invocation, payload, _output):
        self.seen.append(("post", payload))
        await self.stages.pass_("post")
        return self.post


class Play:
    """One runtime with one tool, and a record of everything that happened."""

    def __init__(self, *, hold=(), hooks=True, answer="ok", tools=(), pre=None, post=None):
        self.stages = Stages.holding(*hold)
        self.tool = PlayTool(self.stages, answer=answer)
        self.recorder = Recorder(self.stages)
        self.hooks = PlayHooks(self.stages, pre, post) if hooks else None
        self.turn = TurnCancellation()
        self.timings = []
        self.runtime = ToolRuntime(
            (self.tool, *tools),
            listeners=[self.recorder],
            hooks=self.hooks,
            on_timing=lambda call, timing: self.timings.append((call.call_id, timing)),
        )

    @property
    def events(self):
        return self.recorder.events

    async def call(self, name="play", call_id="1", payload=None):
        call = ToolCall(call_id=call_id, name=ToolName(name), payload={} if payload is None else payload)
        return await self.runtime.call(call, turn=self.turn)

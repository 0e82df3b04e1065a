"""A model's chat template: Jinja in a sandbox, set up as transformers sets it up, so that both write the same text."""

import datetime as dt
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Never, TypeAlias, final

import attrs
import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from ..errors import RequestRejected, SettingsError

Clock: TypeAlias = Callable[[], dt.datetime]


def local_time() -> dt.datetime:
    """The machine's local time, which templates with a date print."""
    return dt.datetime.now().astimezone()


@final
class _Generation(jinja2.ext.Extension):
    """``{% generation %}`` marks what the model wrote, for training masks; here it only has to be understood."""

    tags = {"generation"}  # ruff: ignore[mutable-class-default]  jinja2's own declaration is an instance variable

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """The block as a call, like transformers has it: what is set inside is not seen outside."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_as_it_is"), [], [], body).set_lineno(line)

    @staticmethod
    def _as_it_is(caller: Callable[[], str]) -> str:
        return caller()


def _raise_exception(message: str) -> Never:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,  # ruff: ignore[boolean-type-hint-positional-argument, boolean-default-value-positional-argument]  templates pass it so
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # ruff: ignore[boolean-type-hint-positional-argument, boolean-default-value-positional-argument]
) -> str:
    """jinja2's own filter escapes HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment(now: Clock) -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, jinja2.ext.loopcontrols],
        autoescape=False,  # the output is text for a model, not HTML
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: now().strftime(form)
    return environment


@final
@attrs.frozen(kw_only=True, eq=False)
class ChatTemplate:
    """Compiled templates by name; ``special`` are the named special tokens that they may write."""

    templates: Mapping[str, jinja2.Template]
    special: Mapping[str, str]
    origin: str

    @classmethod
    def compiled(
        cls, sources: Mapping[str, str], *, special: Mapping[str, str], now: Clock, origin: str
    ) -> "ChatTemplate":
        """Compile them once.

        Raises:
          SettingsError: one is no template; names the file and the line.

        """
        environment = _environment(now)
        try:
            templates = {name: environment.from_string(source) for name, source in sources.items()}
        except jinja2.TemplateSyntaxError as error:
            raise SettingsError(f"chat template of {origin}, line {error.lineno}: {error.message}") from error
        return cls(templates=templates, special=dict(special), origin=origin)

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] | None,
        *,
        add_generation_prompt: bool,
    ) -> str:
        """The text of a conversation.

        Raises:
          RequestRejected: the template refuses these messages, or fails on them.

        """
        template = self._chosen(with_tools=tools is not None)
        try:
            return template.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self.special,
            )
        except Exception as error:  # a template is a program of the model's maker
            raise RequestRejected(f"the chat template of {self.origin} refused the messages: {error}") from error

    def _chosen(self, *, with_tools: bool) -> jinja2.Template:
        """As transformers: ``tool_use`` when there are tools and such a template, else ``default``."""
        wanted = "tool_use" if with_tools and "tool_use" in self.templates else "default"
        if wanted not in self.templates:
            raise RequestRejected(f"{self.origin} has no chat template 'default', only {sorted(self.templates)}")
        return self.templates[wanted]

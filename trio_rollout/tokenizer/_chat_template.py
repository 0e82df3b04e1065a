"""A model's chat template: Jinja in a sandbox, set up as transformers sets it up, so that both write the same text.

transformers would be 300 MB of environment and seconds of import for these hundred lines. So the package sets up Jinja
itself: the sandbox, trimmed blocks, ``tojson`` without HTML escapes, ``generation`` blocks, loop controls,
``strftime_now``. With transformers 5.24 on the same folders, texts and ids agreed in all cases that were tried, with and
without tools: docs/decisions/0015-chat-templates-without-transformers.md.
"""

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
    """Return the machine's local time, for templates that print a date."""
    return dt.datetime.now().astimezone()


@final
class _Generation(jinja2.ext.Extension):
    """``{% generation %}`` marks the model's text for training masks; here the block only has to be parsed."""

    tags = {"generation"}  # ruff: ignore[mutable-class-default]  jinja2's own declaration is an instance variable

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """Return the block as a call, as transformers does: variables set inside are not visible outside."""
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
    """Encode JSON without HTML escapes, which jinja2's filter adds and no model was trained on."""
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
    """Compiled templates by name; ``special`` are the named special tokens that templates may write."""

    templates: Mapping[str, jinja2.Template]
    special: Mapping[str, str]
    origin: str

    @classmethod
    def compiled(
        cls, sources: Mapping[str, str], *, special: Mapping[str, str], now: Clock, origin: str
    ) -> "ChatTemplate":
        """Compile the templates.

        Raises:
          SettingsError: a template has a syntax error; names the file and the line.

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
        """Return the text of a conversation.

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
        except Exception as error:  # a template is a program by the model's author, and may raise anything
            raise RequestRejected(f"the chat template of {self.origin} refused the messages: {error}") from error

    def _chosen(self, *, with_tools: bool) -> jinja2.Template:
        """Return ``tool_use`` if there are tools and such a template, else ``default``, as transformers does."""
        wanted = "tool_use" if with_tools and "tool_use" in self.templates else "default"
        if wanted not in self.templates:
            raise RequestRejected(f"{self.origin} has no chat template 'default', only {sorted(self.templates)}")
        return self.templates[wanted]

"""A tokenizer from a model's folder, with the results of transformers and SGLang on the same folder.

Loading reads files; everything else only computes.

A model's chat template is Jinja in a sandbox, set up as transformers sets it up, so that both write the same text.
transformers would be 300 MB of environment and seconds of import for these hundred lines. So the package sets up Jinja
itself: the sandbox, trimmed blocks, ``tojson`` without HTML escapes, ``generation`` blocks, loop controls,
``strftime_now``. With transformers 5.24 on the same folders, texts and ids agreed in all cases that were tried, with and
without tools: docs/decisions/0015-chat-templates-without-transformers.md.
"""

import datetime as dt
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Never, TypeAlias, final

import attrs
import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import msgspec
import tokenizers

from ..errors import RequestRejected, SettingsError
from ._arrangement import Arrangement, markup_of_image

Clock: TypeAlias = Callable[[], dt.datetime]

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
SPECIAL_FILE = "special_tokens_map.json"
TEMPLATE_FILE = "chat_template.jinja"
LARGE_TEXT = 8192
"""Characters. Longer texts take milliseconds or more (measured: 400,000 take a second), so callers use a thread."""
_TAKEN = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message"})
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def local_time() -> dt.datetime:
    """Return the machine's local time, for templates that print a date."""
    return dt.datetime.now().astimezone()


def load_tokenizer(path: str | Path, *, variables: Mapping[str, object] = {}, now: Clock = local_time) -> "Tokenizer":
    """Load a tokenizer from a model's folder, or from a tokenizer.json.

    The files beside tokenizer.json are optional: tokenizer_config.json, special_tokens_map.json and chat_template.jinja.
    ``variables`` are the chat template's, such as ``{"enable_thinking": False}``. ``now`` returns the time for templates
    that print a date. Blocks while it reads: up to a second for a large vocabulary.

    Raises:
      SettingsError: there is no tokenizer.json, a file can't be read as its name says, or a variable has the name of one
        that the caller of a template sets.
    """
    require_variables(variables, "variables")
    given = Path(path)
    file = given / TOKENIZER_FILE if given.is_dir() else given
    if not file.is_file():
        raise SettingsError(f"tokenizer: got {str(path)!r}, allowed: a folder with {TOKENIZER_FILE}, or such a file")
    backend = _load_backend(file)
    config = _read_json(file.with_name(CONFIG_FILE))
    special = _special_tokens(_read_json(file.with_name(SPECIAL_FILE)), config)
    eos = special.get("eos_token")
    return Tokenizer(
        path=given,
        vocab_size=max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1,
        eos_token_id=None if eos is None else backend.token_to_id(eos),
        added_tokens={token: added.content for token, added in backend.get_added_tokens_decoder().items()},
        backend=backend,
        template=_load_template(file.parent, config, special, now),
        variables=dict(variables),
    )


@final
@attrs.frozen(kw_only=True, eq=False, repr=False)
class Tokenizer:
    """A tokenizer, made by ``load_tokenizer``. Tasks and threads may share it: it keeps no state between calls."""

    path: Path
    vocab_size: int
    """The highest token id plus one, with added tokens. A model's embedding may have more rows."""
    eos_token_id: int | None
    """The id of ``eos_token`` in tokenizer_config.json; None if the file names none."""
    added_tokens: Mapping[int, str]
    """Tokens that were added to the vocabulary as a whole: end marks, markup of tool calls and thoughts."""
    _backend: tokenizers.Tokenizer = attrs.field(alias="backend")
    _template: "_ChatTemplate | None" = attrs.field(alias="template")
    variables: Mapping[str, object] = attrs.field(factory=dict)
    """Variables of the chat template, for every conversation that names no others."""
    image_markup: str | None = attrs.field(init=False)
    """The chat template's text in the place of an image; None if it takes none."""
    _arrangement: Arrangement = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        probe = partial(self._written, tools=None, variables=self.variables, add_generation_prompt=True)
        arrangement = Arrangement() if self._template is None else Arrangement.of(probe)
        object.__setattr__(self, "_arrangement", arrangement)
        object.__setattr__(self, "image_markup", None if self._template is None else markup_of_image(probe))

    def __repr__(self) -> str:
        template = "with" if self._template is not None else "without"
        return f"<Tokenizer {str(self.path)!r}, {self.vocab_size} tokens, {template} a chat template>"

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text.

        ``add_special_tokens`` adds the special tokens that the tokenizer puts around a text, such as a leading BOS; SGLang
        does the same with text. Special tokens that are written out in the text become their ids.
        """
        if len(text) > LARGE_TEXT:  # this function releases the interpreter's lock, and takes half the time
            (encoded,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            return list(encoded.ids)
        return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of these ids; ``skip_special_tokens`` leaves special tokens out."""
        return self._backend.decode(list(map(int, ids)), skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, object] = {},
    ) -> list[int]:
        """Return the ids of a conversation. The template writes the special tokens itself, so none are added.

        See ``render_chat``.

        Raises:
          RequestRejected: there is no chat template, or it refuses these messages.
        """
        text = self.render_chat(
            messages,
            tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=variables,
        )
        return self.encode(text, add_special_tokens=False)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, object] = {},
    ) -> str:
        """Return the text of a conversation, as the model's chat template writes it.

        ``add_generation_prompt`` ends the text where the model's answer begins. ``continue_final_message`` ends it behind
        the words of the last message instead, so that the answer goes on from there. ``variables`` are the template's, and
        take precedence over the tokenizer's. System messages that the template does not take where they stand are moved:
        see ``tokenizer/_arrangement.py``.

        Raises:
          RequestRejected: there is no chat template, or it refuses these messages or fails on them.
        """
        arranged, wanted = self._arrangement.arranged(messages), {**self.variables, **variables}
        if continue_final_message:
            return _upto(self._written(arranged, tools=tools, variables=wanted, add_generation_prompt=False), arranged)
        return self._written(arranged, tools=tools, variables=wanted, add_generation_prompt=add_generation_prompt)

    def _written(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None,
        variables: Mapping[str, object],
        add_generation_prompt: bool,
    ) -> str:
        if (chat := self._template) is None:
            raise RequestRejected(
                f"messages can't be encoded: {self.path} has neither {TEMPLATE_FILE} nor a 'chat_template' in {CONFIG_FILE}"
            )
        # As transformers does: ``tool_use`` if there are tools and such a template.
        wanted = "tool_use" if tools is not None and "tool_use" in chat.templates else "default"
        if wanted not in chat.templates:
            raise RequestRejected(f"{chat.origin} has no chat template 'default', only {sorted(chat.templates)}")
        context = {**chat.special, "documents": None, **variables, "messages": messages, "tools": tools}
        try:
            return chat.templates[wanted].render(context, add_generation_prompt=add_generation_prompt)
        except Exception as error:  # a template is a program by the model's author, and may raise anything
            raise RequestRejected(f"the chat template of {chat.origin} refused the messages: {error}") from error


def require_variables(variables: Mapping[str, object], name: str) -> None:
    """Check the names of a chat template's variables; ``name`` is the setting's.

    Raises:
      SettingsError: a variable has the name of one that the caller of a template sets.
    """
    if taken := sorted(_TAKEN.intersection(variables)):
        raise SettingsError(f"{name}: got {', '.join(taken)}, allowed: names other than {', '.join(sorted(_TAKEN))}")


def _upto(text: str, messages: Sequence[Mapping[str, object]]) -> str:
    """Return a conversation's text without what the template writes behind the words of the last message."""
    words = messages[-1].get("content") if messages else None
    words = words if isinstance(words, str) else ""
    begin = text.rfind(words.strip())
    if begin < 0 or not words:
        raise RequestRejected("the last message can't be continued: it is empty, or the chat template does not show it")
    kept = words.lstrip() if text.startswith(words.lstrip(), begin) else words.strip()
    return text[: begin + len(kept)]


def _load_backend(file: Path) -> tokenizers.Tokenizer:
    try:
        backend = tokenizers.Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises bare Exception
        raise SettingsError(f"tokenizer: {file} can't be loaded: {error}") from error
    # The file may hold truncation and padding of the training set; transformers turns both off for a plain call, too.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _load_template(
    folder: Path, config: Mapping[str, Any], special: Mapping[str, str], now: Clock
) -> "_ChatTemplate | None":
    file = folder / TEMPLATE_FILE
    if file.is_file():  # this file takes precedence over the configuration, as in transformers
        sources = {"default": _read_text(file)}
    elif (template := config.get("chat_template")) is not None:
        file, sources = folder / CONFIG_FILE, _named(template, folder)
    else:
        return None
    environment = _environment(now)
    try:
        templates = {name: environment.from_string(source) for name, source in sources.items()}
    except jinja2.TemplateSyntaxError as error:
        raise SettingsError(f"chat template of {file}, line {error.lineno}: {error.message}") from error
    return _ChatTemplate(templates=templates, special=special, origin=str(file))


def _named(template: Any, folder: Path) -> dict[str, str]:
    """Return a configuration's templates by name: it holds one template, or a list of names and templates."""
    templates = [{"name": "default", "template": template}] if isinstance(template, str) else template
    try:
        return msgspec.convert({entry["name"]: entry["template"] for entry in templates}, dict[str, str])
    except (TypeError, KeyError, msgspec.ValidationError) as error:
        raise SettingsError(
            f"tokenizer: 'chat_template' of {folder / CONFIG_FILE} must be a text, or a list of objects with 'name' and "
            f"'template', got {template!r:.200}"
        ) from error


def _special_tokens(*configs: Mapping[str, Any]) -> dict[str, str]:
    """Return named special tokens as text; later files take precedence. Each is a string, or an object with ``content``."""
    found: dict[str, str] = {}
    for config in configs:
        extra = config.get("extra_special_tokens")  # a model's own: image_token, say
        named = {name: config.get(name) for name in _SPECIAL_TOKENS} | (extra if isinstance(extra, dict) else {})
        for name, value in named.items():
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                found[name] = text
    return found


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(_read_text(file))
    except ValueError as error:
        raise SettingsError(f"tokenizer: {file} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise SettingsError(f"tokenizer: {file} must be a JSON object, got {type(value).__name__}")
    return value


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"tokenizer: {file} can't be read: {error}") from error


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
class _ChatTemplate:
    """A model's compiled templates by name; ``special`` are the named special tokens that templates may write."""

    templates: Mapping[str, jinja2.Template]
    special: Mapping[str, str]
    origin: str

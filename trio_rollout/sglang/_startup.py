"""Meets the servers when the client is opened: checks that they speak SGLang, and reads versions, vocabulary and context length."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from .._core.server import Event, Told
from .._http import Address, Connector, parse_url
from .._util.threads import RunSync
from ..errors import ServerError, SettingsError
from ._calls import context_length, is_ready, model_info, on_each, workers
from ._server import Roster, Server, new_server
from ._settings import ServerSettings
from ._wire import ModelInfo

_log: Final = logging.getLogger("trio_rollout.sglang")


async def discover(router: str, settings: ServerSettings, connect: Connector) -> Sequence[str]:
    """Return the URLs of a router's workers.

    A router forwards no abort, pause or weight update, so its workers are talked to directly, for generation too
    (docs/decisions/0011-a-routers-workers-are-talked-to-directly.md).

    Raises:
      ServerError: it can't be reached, is not a router, or has no workers.
    """
    asked = new_server(parse_url(router), settings, connect)

    try:
        outcome = await on_each([asked], workers, seconds=settings.control, what="GET the workers of")
    finally:
        asked.close()
    if outcome.failures:
        raise ServerError(f"router {outcome}") from outcome.failures[asked]
    found = outcome.answers[asked]
    if not found:
        raise ServerError(f"router {router} has no workers")
    return found


def proxy_of(settings: ServerSettings) -> Address | None:
    """Return the address of the proxy in the settings; None if there is none.

    Raises:
      SettingsError: its URL is not ``http://host:port``.
    """
    if settings.proxy is None:
        return None
    address = parse_url(settings.proxy)
    if address.tls or address.prefix or address.unix_path is not None:
        raise SettingsError(f"proxy: got {settings.proxy!r}, allowed: http://host:port")
    return address


def servers_of(urls: Sequence[str], settings: ServerSettings, connect: Connector, roster: Roster) -> Sequence[Server]:
    """Return the servers behind these URLs; the same URL twice is one server."""
    addresses = {address.url: address for address in map(parse_url, urls)}
    if not addresses:
        raise SettingsError("open_sglang_servers: got no URL and no router, allowed: at least one of them")
    return tuple(new_server(address, settings, connect, roster) for address in addresses.values())


async def meet(servers: Sequence[Server], settings: ServerSettings) -> Sequence[ModelInfo]:
    """Ask every server for its model and version.

    Raises:
      ServerError: names each URL that can't be reached or does not speak SGLang, with its answer.
    """
    outcome = await on_each(servers, model_info, seconds=settings.control, what="GET model info of")
    if outcome.failures:
        count = f"{len(outcome.failures)} of {len(servers)}"
        raise ServerError(f"{count} servers do not answer as SGLang does: {outcome}")
    for server, info in outcome.answers.items():
        if not info.generates:
            raise ServerError(f"{server.url}: its model {info.model_path!r} does not generate (is_generation is false)")
        server.tell(Told(Event.JOINED, name=info.weight_version))
    await _note_paused(servers, settings)
    return list(outcome.answers.values())


async def _note_paused(servers: Sequence[Server], settings: ServerSettings) -> None:
    """Note the servers that answer and are not ready: they would park requests without an answer."""
    outcome = await on_each(servers, is_ready, seconds=settings.control, what="GET /ready of")
    for server, ready in outcome.answers.items():
        if ready:
            continue
        if settings.resume_at_start:
            server.tell(Told(Event.FOUND_PAUSED))  # the probe resumes it
            _log.warning("server %s is not ready, and is resumed", server.url)
        else:
            why = "it was not ready at the start: paused by another client, or by a run that was killed"
            server.tell(Told(Event.NOT_READY, why=why))


async def context_length_of(servers: Sequence[Server], settings: ServerSettings) -> int | None:
    """Return how long prompt and output may be together on each of these servers; None if none of them says."""
    if settings.context_length is not None:
        return settings.context_length
    outcome = await on_each(servers, context_length, seconds=settings.control, what="GET server info of")
    return min((length for length in outcome.answers.values() if length is not None), default=None)


def _read_vocab_size(model_path: str) -> int | None:
    """Return ``vocab_size`` of the ``config.json`` under a local model path; None if it cannot be read."""
    try:
        config = msgspec.json.decode(Path(model_path, "config.json").read_bytes())
    except (OSError, ValueError, msgspec.DecodeError):
        return None
    if not isinstance(config, dict):
        return None
    nested = config.get("text_config")
    for part in (config, nested if isinstance(nested, dict) else {}):
        size = part.get("vocab_size")
        if isinstance(size, int) and size > 0:
            return size
    return None


async def vocab_size_of(infos: Sequence[ModelInfo], settings: ServerSettings, run_sync: RunSync) -> int | None:
    """Return the size of the smallest vocabulary of these servers; None, with one warning, if it is unknown."""
    if settings.vocab_size is not None:
        return settings.vocab_size
    paths = {info.model_path for info in infos if info.model_path is not None}
    sizes = [await run_sync(_read_vocab_size, path) for path in sorted(paths)]
    known = [size for size in sizes if size is not None]
    if known:
        return min(known)
    _log.warning(
        "the vocabulary's size is unknown (no readable config.json under %s): token ids are not checked, and one outside "
        "it kills a server; give ServerSettings(vocab_size=...)",
        sorted(paths) or "any model path",
    )
    return None

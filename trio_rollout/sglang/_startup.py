"""Meeting the servers: who they are, that they speak SGLang, and how large their vocabulary is."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from .._threads import RunSync
from ..errors import ServerError, SettingsError
from ._calls import call, model_info, on_each
from ._http import Connector, parse_url
from ._server import Server, new_server
from ._settings import ServerSettings
from ._wire import WORKERS, ModelInfo, decode_workers

_log: Final = logging.getLogger("trio_rollout.sglang")


async def discover(router: str, settings: ServerSettings, connect: Connector) -> Sequence[str]:
    """The URLs of a router's workers.

    A router forwards no abort, pause or weight update, so its workers are talked to directly, for generation too.

    Raises:
      ServerError: it can't be reached, is no router, or has no workers.

    """
    asked = new_server(parse_url(router), settings, connect)

    async def ask(server: Server) -> Sequence[str]:
        reply = await call(server, "GET", WORKERS[0])
        if not reply.ok:
            older = await call(server, "GET", WORKERS[1])
            reply = older if older.ok else reply
        if not reply.ok:
            raise reply.error()
        return decode_workers(reply.attempted, reply.body)

    try:
        outcome = await on_each([asked], ask, seconds=settings.control, what="GET the workers of")
    finally:
        asked.close()
    if outcome.failures:
        raise ServerError(f"router {outcome}") from outcome.failures[asked]
    workers = outcome.answers[asked]
    if not workers:
        raise ServerError(f"router {router} has no workers")
    return workers


def servers_of(urls: Sequence[str], settings: ServerSettings, connect: Connector) -> Sequence[Server]:
    """The servers behind these URLs; the same URL twice is one server."""
    if isinstance(urls, str):  # a string is a sequence of one-letter URLs
        raise SettingsError(f"urls: got the string {urls!r}, allowed: a sequence of URLs")
    addresses = {address.url: address for address in map(parse_url, urls)}
    if not addresses:
        raise SettingsError("open_sglang_servers: got no URL and no router, allowed: at least one of them")
    return tuple(new_server(address, settings, connect) for address in addresses.values())


async def meet(servers: Sequence[Server], settings: ServerSettings) -> Sequence[ModelInfo]:
    """Ask every server who it is.

    Raises:
      ServerError: names each URL that can't be reached or does not speak SGLang, with what it said.

    """
    outcome = await on_each(servers, model_info, seconds=settings.control, what="GET model info of")
    if outcome.failures:
        count = f"{len(outcome.failures)} of {len(servers)}"
        raise ServerError(f"{count} servers do not answer as SGLang does: {outcome}")
    for server, info in outcome.answers.items():
        if not info.generates:
            raise ServerError(f"{server.url}: its model {info.model_path!r} does not generate (is_generation is false)")
        server.naming.observe(info.weight_version)
    return list(outcome.answers.values())


def _read_vocab_size(model_path: str) -> int | None:
    """``vocab_size`` of the ``config.json`` under a local model path; None if there is none to read."""
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
    """The smallest vocabulary of these servers, else None with one warning."""
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

"""The servers of a run: those that were named, or a tiny one in a process of its own."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import attrs

from ..sglang import ServerSettings, SGLangServers, open_sglang_servers
from ..tiny import open_tiny_process


@attrs.frozen(kw_only=True)
class ServerChoice:
    """Which servers a run uses; no URL and no router: a tiny server of its own."""

    urls: tuple[str, ...] = ()
    router: str | None = None
    tokenizer: str | None = None
    vocab_size: int | None = None
    api_key: str | None = attrs.field(default=None, repr=False)


@asynccontextmanager
async def open_servers(choice: ServerChoice, *, say: Callable[[str], Awaitable[None]]) -> AsyncGenerator[SGLangServers]:
    """The servers, each of which has said who it is.

    Entering blocks until they have. Leaving ends the tiny server.

    Raises:
      ServerError: names each server that can't be reached or does not speak SGLang, with what it said.

    """
    async with AsyncExitStack() as stack:
        urls = choice.urls
        if not urls and choice.router is None:
            tiny = await stack.enter_async_context(open_tiny_process())
            await say(f"no --server given: a tiny model answers at {tiny.url}")
            urls = (tiny.url,)
        settings = ServerSettings(vocab_size=choice.vocab_size, api_key=choice.api_key)
        yield await stack.enter_async_context(
            open_sglang_servers(urls, router=choice.router, tokenizer=choice.tokenizer, settings=settings)
        )

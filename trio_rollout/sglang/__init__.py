"""The client of SGLang servers: choice of a server, the hot path, control calls, aborts that are owed."""

from ._client import SGLangServers as SGLangServers
from ._client import open_sglang_servers as open_sglang_servers
from ._settings import ServerSettings as ServerSettings

__all__ = ["SGLangServers", "ServerSettings", "open_sglang_servers"]

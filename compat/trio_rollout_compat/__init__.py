"""Hosts and clients that are not Trio: asyncio code inside the engine, and the engine inside asyncio, threads and trainers.

General layout: ``bridge`` runs asyncio functions from Trio; ``thread`` runs the engine beside a program that is not Trio.
``docs/embedding.md`` says which way to choose. Importing this package never imports trio_asyncio.
"""

from .bridge import open_bridge as open_bridge

__all__ = ["open_bridge"]

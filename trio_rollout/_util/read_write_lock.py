"""A lock for many readers or one writer; a waiting writer keeps new readers out. As SGLang's: requests read, updates write.

Separate because a lock knows nothing of the requests and updates that it keeps apart.
"""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import final

import attrs
import trio


@final
@attrs.define(eq=False, repr=False)
class ReadWriteLock:
    """Who is inside, and who waits."""

    readers: int = attrs.field(default=0, init=False)
    writers: int = attrs.field(default=0, init=False)
    """Those inside and those waiting."""
    _writing: bool = attrs.field(default=False, init=False)
    _lot: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot, init=False)

    def __repr__(self) -> str:
        return f"<ReadWriteLock {self.readers} readers, {self.writers} writers>"

    @property
    def held(self) -> bool:
        """Whether anybody is inside."""
        return self._writing or self.readers > 0

    @asynccontextmanager
    async def reading(self) -> AsyncGenerator[None]:
        """Be inside as a reader. Entering blocks while a writer is inside or waits."""
        while self.writers:
            await self._lot.park()
        self.readers += 1
        try:
            yield
        finally:
            self.readers -= 1
            self._lot.unpark_all()

    @asynccontextmanager
    async def writing(self) -> AsyncGenerator[None]:
        """Be inside alone. Entering blocks until everybody else has left."""
        self.writers += 1
        try:
            while self.held:
                await self._lot.park()
            self._writing = True
            try:
                yield
            finally:
                self._writing = False
        finally:
            self.writers -= 1
            self._lot.unpark_all()

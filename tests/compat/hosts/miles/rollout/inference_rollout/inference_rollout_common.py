"""Stand-in for the state that miles gives to generate functions. It has a semaphore, so it belongs to one loop."""

import asyncio


class GenerateState:
    def __init__(self, args):
        asyncio.get_running_loop()
        self.args = args
        self.generate_fn_semaphore = asyncio.Semaphore(2)
        self.aborted = False

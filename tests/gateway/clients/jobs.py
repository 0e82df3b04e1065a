"""The jobs of one client, and the words in them: what every client's program is told, and what it prints."""

import asyncio
import json
import sys
import traceback

SYSTEM = "You are a helpful assistant."
WEATHER = "the weather in Paris, please"
LONG = "write the long file"
HELLO = "say hello"
AT_ONCE = 40
IDLE_S = 2.0
"""The longest silence that a client bears in the job ``long``."""


def run(tool, at_once, long):
    """Do the jobs of the command line; print a JSON object: for each name the words that it ended with, or its error.

    ``tool``, ``at_once`` and ``long`` are coroutine functions of a base URL and a key.
    """
    asyncio.run(_run({"tool": tool, "at once": at_once, "long": long}))


async def _run(functions):
    said = {}
    for job in json.loads(sys.argv[1]):
        try:
            said[job["name"]] = await functions[job["kind"]](job["base_url"], job["key"])
        except Exception as error:  # noqa: BLE001  whatever a client raises is what it says
            traceback.print_exc()
            said[job["name"]] = f"{type(error).__name__}: {error}"
    print("\n" + json.dumps(said), flush=True)  # noqa: T201  the output of a program


async def forty(ask):
    """Call ``ask`` forty times at once, and return how many answers each of the words said."""
    answers = await asyncio.gather(*(ask(number) for number in range(AT_ONCE)))
    return "; ".join(f"{answers.count(words)} x {words}" for words in sorted(set(answers)))

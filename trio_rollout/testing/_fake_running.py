"""The requests that FakeSGLang runs: their tokens, their spans, and the JSON of their answers."""

import attrs
import trio

from ._fake_plan import Fault, Run


@attrs.define(eq=False)
class Running:
    """One request that is being generated, or waits in a paused server."""

    rid: str
    prompt: list[int]
    wanted: int
    run: Run | None
    text: bool
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    parked: bool = False
    """It came while the server was paused: SGLang loses the aborts of such a request."""
    deaf: bool = False
    """An abort for it was lost; SGLang remembers that it sent one, and swallows the others."""
    abort_later: bool = False
    """An abort for it came while the server was paused."""
    aborted: bool = False
    spans: list[tuple[str, int]] = attrs.field(factory=list)
    """(version, tokens so far) for every version it has sampled under but the last."""

    @property
    def so_far(self) -> int:
        """Tokens that it has while it runs."""
        return min(self.wanted, self.run.partial) if self.run is not None else 0

    def answer(self, version: str, fault: Fault | None) -> object:
        """The JSON of its answer."""
        if fault is Fault.WRONG_TYPE:
            return ["no", "answer"]
        count = self.so_far if self.aborted else self.wanted
        ids = [(sum(self.prompt) + place) % 997 for place in range(count)]
        triples: list[list[float | int | None]] = [
            [-0.5 - place % 8 / 8, token, None] for place, token in enumerate(ids)
        ]
        if fault is Fault.FEWER_LOG_PROBS:
            del triples[-1]
        if fault is Fault.OTHER_TOKEN:
            triples[-1][1] = 998
        if fault is Fault.NULL_LOG_PROB:
            triples[-1][0] = None
        meta: dict[str, object] = {
            "id": "0" * 32 if fault is Fault.OTHER_ANSWER else self.rid,
            "finish_reason": self._reason(count),
            "completion_tokens": count,
            "weight_version": version,
            "weight_versions": self._versions(version, count),
            "e2e_latency": 0.01,
        }
        if not (self.aborted and not count):  # aborted in the queue: a shorter record
            meta |= {"prompt_tokens": len(self.prompt), "cached_tokens": 0, "num_retractions": 0}
            meta["output_token_logprobs"] = triples
        for lost, field in ((Fault.NO_LOG_PROBS, "output_token_logprobs"), (Fault.NO_FINISH_REASON, "finish_reason")):
            if fault is lost:
                meta.pop(field, None)
        answer = {"text": " ".join(map(str, ids)), "output_ids": ids, "meta_info": meta}
        return answer | {"prompt_token_ids": self.prompt} if self.text else answer

    def _reason(self, count: int) -> dict[str, object]:
        if not self.aborted:
            return {"type": "length", "length": count}
        return {"type": "abort", "message": "Aborted" if count else "Abort in waiting queue"}

    def _versions(self, version: str, count: int) -> list[dict[str, object]]:
        spans, start = [], 0
        for name, stop in [*self.spans, (version, count)]:
            if stop > start:
                spans.append({"version": name, "start": start, "end": stop})
            start = max(start, stop)
        return spans

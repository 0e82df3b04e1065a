"""FakeSGLang's control routes: abort, pause, continue, flush, weights, and what it says about itself."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import trio

from ._fake_plan import Reply

if TYPE_CHECKING:
    from ._fake_sglang import FakeSGLang


def control(fake: "FakeSGLang", path: str, body: Mapping[str, object]) -> Reply:
    """Do what a control call asks for, and answer it."""
    match path:
        case "/abort_request":
            fake.abort(str(body.get("rid") or ""), everything=bool(body.get("abort_all")))
        case "/pause_generation":
            fake.pause(str(body.get("mode", "abort")))
        case "/continue_generation":
            fake.resume()
        case "/flush_cache":
            busy = fake.in_flight and fake.mode != "retract"
            return Reply(status=400, body=b"Flush cache failed.\n") if busy else Reply(body=b"Cache flushed.\n")
        case "/update_weight_version":
            fake.version = str(body.get("new_version"))
        case "/update_weights_from_disk":
            fake.version = str(body.get("weight_version") or fake.version)
        case _:
            return _info(fake, path)
    return Reply() if path == "/abort_request" else Reply(body={"status": "ok", "success": True})


def _info(fake: "FakeSGLang", path: str) -> Reply:
    match path:
        case "/ready" | "/ping":
            return Reply(status=503 if fake.paused and path == "/ready" else 200)
        case "/health" | "/health_generate":
            return Reply(status=503 if fake.paused else 200)
        case "/model_info" | "/get_model_info":
            info = {"model_path": "fake", "is_generation": True, "weight_version": fake.version}
            return Reply(body=info)
        case "/server_info" | "/get_server_info":
            return Reply(body={"version": "fake", "incremental_streaming_output": fake.incremental})
        case "/v1/loads":
            load = {"dp_rank": 0, "num_running_reqs": fake.in_flight, "num_waiting_reqs": 0}
            return Reply(body={"timestamp": trio.current_time(), "loads": [load]})
        case _:
            return Reply(status=404, body={"detail": "Not Found"})

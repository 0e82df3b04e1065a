"""What is said to and by SGLang: every JSON field name of its HTTP interface lives in this room, and nowhere else."""

from ._answer import VersionOf as VersionOf
from ._answer import decode_turn as decode_turn
from ._control import ABORT as ABORT
from ._control import CONTINUE as CONTINUE
from ._control import FLUSH as FLUSH
from ._control import GENERATE as GENERATE
from ._control import LOADS as LOADS
from ._control import MODEL_INFO as MODEL_INFO
from ._control import PAUSE as PAUSE
from ._control import READY as READY
from ._control import WORKERS as WORKERS
from ._control import ModelInfo as ModelInfo
from ._control import abort_all_body as abort_all_body
from ._control import abort_body as abort_body
from ._control import decode_load as decode_load
from ._control import decode_model_info as decode_model_info
from ._control import decode_workers as decode_workers
from ._control import flushed as flushed
from ._control import pause_body as pause_body
from ._errors import error_of as error_of
from ._errors import words_of as words_of
from ._request import GenerateRequest as GenerateRequest
from ._request import checked_ids as checked_ids
from ._request import generate_request as generate_request
from ._versions import DEFAULT_VERSION as DEFAULT_VERSION
from ._versions import number_of as number_of

"""Chat templates of the kinds that models have, in a folder with the tiny server's tokenizer."""

import shutil

from trio_rollout.tiny import DATA

_TOOLS = r"""
{%- macro calls(message) %}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\n{"name": ' }}{{ call.function.name | tojson }}{{ ', "arguments": {' }}
{%- for key, value in call.function.arguments.items() %}{{ (', ' if not loop.first else '') }}{{ key | tojson }}: {{ value | tojson }}{% endfor %}
{{- '}}\n</tool_call>' }}
{%- endfor %}
{%- endmacro %}
{%- if tools %}{{ '<tools>' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{{ '</tools>\n' }}{% endif %}
"""
_MESSAGE = r"""
{{- '<|im_start|>' + (message.role if message.role != 'tool' else 'user') + '\n' }}
{%- if message.role == 'tool' %}{{ '<tool_response>' + message.content + '</tool_response>' }}{% else %}{{ message.content }}{{ calls(message) }}{% endif %}
{{- '<|im_end|>\n' }}
"""
_END = r"""{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

# One system message, at the beginning; calls are written member by member.
ONE_SYSTEM = (
    _TOOLS
    + r"""
{%- for message in messages %}
{%- if message.role == 'system' and not loop.first %}{{ raise_exception('System message must be at the beginning.') }}{% endif %}
"""
    + _MESSAGE
    + "{%- endfor %}"
    + _END
)

# A second system message is left out without a word.
DROPS_LATER = (
    _TOOLS
    + r"""
{%- for message in messages %}
{%- if message.role != 'system' or loop.first %}
"""
    + _MESSAGE
    + "{%- endif %}{%- endfor %}"
    + _END
)

# No system message, and the roles take turns.
NO_SYSTEM = (
    _TOOLS
    + r"""
{%- set ns = namespace(last='') %}
{%- for message in messages %}
{%- if message.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- if message.role == ns.last and ns.last == 'user' %}{{ raise_exception('Roles must alternate') }}{% endif %}
{%- set ns.last = message.role %}
"""
    + _MESSAGE
    + "{%- endfor %}"
    + _END
)

# One system message; writes thoughts into answers after the last question of the user, and an empty thought into the
# newest answer; ``enable_thinking`` and ``reasoning_effort`` are its variables.
THINKING = (
    _TOOLS
    + r"""
{%- if reasoning_effort is defined %}{{ '<effort>' + reasoning_effort + '</effort>\n' }}{% endif %}
{%- set ns = namespace(asked=-1) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{% set ns.asked = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'system' and not loop.first %}{{ raise_exception('System message must be at the beginning.') }}{% endif %}
{%- if message.role == 'assistant' %}
{{- '<|im_start|>assistant\n' }}
{%- if loop.index0 > ns.asked and (loop.last or message.reasoning_content) %}
{{- '<think>\n' + (message.reasoning_content or '').strip('\n') + '\n</think>\n\n' }}
{%- endif %}
{{- message.content.lstrip('\n') }}{{ calls(message) }}{{ '<|im_end|>\n' }}
{%- else %}
"""
    + _MESSAGE
    + r"""
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}
"""
)

TEMPLATES = {
    "one system": ONE_SYSTEM,
    "drops later": DROPS_LATER,
    "no system": NO_SYSTEM,
    "thinking": THINKING,
    "several": None,
}


def folder_with(template, folder):
    """Write the tiny server's tokenizer with this template (None: the tiny server's) to a folder; return the folder."""
    shutil.copytree(DATA, folder, dirs_exist_ok=True)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder

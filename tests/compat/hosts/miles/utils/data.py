"""Stand-in for miles's Dataset."""

from miles.utils.types import Sample


class Dataset:
    def __init__(
        self, path, *, tokenizer, processor, max_length, prompt_key, label_key, multimodal_keys, metadata_key, tool_key,
        apply_chat_template, apply_chat_template_kwargs,
    ):  # fmt: skip
        self.samples = [Sample(prompt=f"{path} {number}", label=str(number)) for number in range(3)]

"""Stand-in for miles's loaders."""


def load_tokenizer(path, *, chat_template_path, trust_remote_code):
    return None


def load_processor(path, **kwargs):
    return None

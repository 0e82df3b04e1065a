"""Stand-in for slime's loaders."""


def load_tokenizer(path, **kwargs):
    return None


def load_processor(path, **kwargs):
    return None

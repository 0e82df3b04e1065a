"""The tiny server's language model: a table of logits, its sampler and its tokenizer."""

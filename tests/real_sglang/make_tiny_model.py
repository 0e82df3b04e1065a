"""Write a Qwen2 model with random weights and a new tokenizer, which a real SGLang serves in the tests.

``python make_tiny_model.py DIRECTORY SEED`` with the Python of SGLang's environment. Models of two seeds have one shape
and one tokenizer, so that a weight update can go from one to the other.
"""

import pathlib
import sys
import sysconfig

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

VOCABULARY = 2048
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer():
    """A byte-level BPE trained on the standard library, which every machine has."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    sources = sorted(pathlib.Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:50]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    bpe.train([str(path) for path in sources], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(*, seed, eos):
    """0.8 M parameters in two layers: about a hundred tokens a second on one core."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=eos,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    model = Qwen2ForCausalLM(config).to(torch.float32)
    with torch.no_grad():
        model.lm_head.weight *= 8.0  # random logits are almost flat; a real model's are not
    return model


def main(directory, seed):
    """Write both into ``directory``."""
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(directory)
    make_model(seed=seed, eos=tokenizer.eos_token_id).save_pretrained(directory)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

"""The one kernel SGLang takes from vLLM on a CPU: rotary position embedding, in plain torch and in place."""

import torch


def _turn(states, cos, sin, rotary_dim, head_size, *, halves):
    """Rotate the first ``rotary_dim`` entries of each head; ``halves``: pairs are (i, i + d/2), else (2i, 2i + 1)."""
    turned_part = states.view(cos.shape[0], -1, head_size)[..., :rotary_dim]
    cos, sin = cos.unsqueeze(1).to(states.dtype), sin.unsqueeze(1).to(states.dtype)
    if halves:
        first, second = turned_part.chunk(2, dim=-1)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    else:
        first, second = turned_part[..., 0::2], turned_part[..., 1::2]
        turned = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)
    turned_part.copy_(turned)


def rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox=True, *_args, **_kwargs):
    """Turn ``query`` and ``key`` (which may be None) by their positions, as the CUDA kernel of this name does."""
    table = cos_sin_cache[positions.flatten()]
    cos, sin = table.chunk(2, dim=-1)
    for states in (query, key):
        if states is not None:
            _turn(states, cos, sin, table.shape[-1], head_size, halves=is_neox)

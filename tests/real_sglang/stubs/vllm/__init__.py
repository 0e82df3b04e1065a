"""Stands in for vLLM, of which SGLang imports one CUDA kernel even when it runs on a CPU."""

__version__ = "0"

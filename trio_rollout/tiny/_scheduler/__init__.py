"""The tiny server's continuous batching: requests, steps, the prefix cache. No I/O."""

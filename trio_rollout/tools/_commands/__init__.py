"""Captured commands: run to the end, keep the output, leave nothing behind."""

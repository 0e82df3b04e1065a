"""Captured commands: a command runs to its end, its output is kept, and no process is left behind."""

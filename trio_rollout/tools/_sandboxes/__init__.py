"""Sandboxes: separate places for a rollout's commands and files."""

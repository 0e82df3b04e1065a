"""Sandboxes: where a rollout's commands run apart from everything else."""

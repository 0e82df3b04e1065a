"""The processes that contain a rollout's commands, and the host's side of them."""

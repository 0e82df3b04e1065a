"""Small tools that every room may use: services, conditions, time, threads, locks. No knowledge of rollouts."""

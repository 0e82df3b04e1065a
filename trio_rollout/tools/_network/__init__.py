"""Network policies: what a session may reach."""

"""Network policies: the hosts that an exec session may reach."""

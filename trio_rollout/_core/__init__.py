"""Values and decisions: no trio, no clock, no sockets. Time comes in as a float, randomness as a ``random.Random``."""

"""What every test gets: it fails when it leaves something behind."""

pytest_plugins = ["trio_rollout.testing.pytest_leaks", "pytester"]

"""What a simulated run may be stopped for. All are AssertionErrors: a test that meets one has failed."""


class SimStopped(AssertionError):
    """Root of these errors. The message ends with the task tree of the moment the run was stopped."""


class SimDeadlock(SimStopped):
    """No task can run, and no deadline is left that would wake one."""


class SimTimeout(SimStopped):
    """The run would have gone on beyond its limit of simulated time."""


class SimLivelock(SimStopped):
    """The run took more task steps than allowed."""


class SimStalled(SimStopped):
    """One step did not end: a loop that never yields, or a call that blocks the thread."""


class SystemTaskLeft(SimStopped):
    """A system task was still running when the main function had returned: it had no owner."""


class InvariantBroken(SimStopped):
    """Something that must hold between any two steps did not."""


class InstrumentDropped(SimStopped):
    """An instrument raised during the run. Trio logs that and goes on without it, so its checks were not made."""

"""What a launch cannot do; the message says what happened, on which host, and what to do."""


class LaunchError(RuntimeError):
    pass

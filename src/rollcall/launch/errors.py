"""What a launch cannot do; the message says what happened, on which host, and what to do."""


class LaunchError(RuntimeError):
    pass


class ElsewhereError(LaunchError):
    """The tool speaks with another cluster or project than at the start, which knows nothing of the launch. Nothing was done."""


def reason(error: Exception) -> str:
    """Why a file cannot be read, where the message has named the file."""
    return (isinstance(error, OSError) and error.strerror) or str(error)

"""The version of the package, where every room can read it, and those of others."""

from importlib import metadata

__version__ = "0.1.0"


def installed(name: str) -> str:
    """The version of a package here."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"

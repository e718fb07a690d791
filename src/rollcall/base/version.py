"""The version of the package, where every room can read it, and those of others."""

__version__ = "0.1.0"


def installed(name: str) -> str:
    """The version of a package here."""
    from importlib import metadata  # takes longer than all that `import rollcall` imports

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"

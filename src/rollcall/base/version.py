"""The version of this package, and the versions of installed packages."""

__version__ = "0.1.0"


def installed(name: str) -> str:
    """Return the version of an installed package."""
    from importlib import metadata  # takes longer to import than the rest of `import rollcall`

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"

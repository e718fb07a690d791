"""The packages of the page are an extra; this says so where they are not installed."""

from __future__ import annotations

from importlib.util import find_spec

PACKAGES = ("starlette", "uvicorn", "plotly")


def refuse_without_packages() -> None:
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise ValueError(
            f"the page needs {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed; run: pip install "
            "'rollcall-rl[view]'"
        )

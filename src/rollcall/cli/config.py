"""`rollcall config`: the resolved run file."""

from __future__ import annotations

from rollcall.cli import Overrides, RunFile, split_arguments


def config(file: RunFile = None, overrides: Overrides = None) -> None:
    """Print the resolved run file: every key with its value.

    \b
    Examples:
      rollcall config > run.yaml
      rollcall config examples/gsm8k.yaml actor.lr=2e-6 reward.0.weight=0.5
    """
    from rollcall.config import dump_config, load_config
    from rollcall.config.checks import say_unused

    resolved = load_config(*split_arguments(file, overrides))
    say_unused(resolved)
    print(dump_config(resolved), end="")

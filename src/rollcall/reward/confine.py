"""Confines reward processes.

A built-in scorer needs nothing except the text that it scores. So its process gets no secrets, no network, no access to other
processes, and no files except Python's own and a private folder (``BUILT_IN``). A user's own function is trusted more: its process gets
the environment variables that its section names, and it may use the network unless the section turns that off. The section may also
change its limits.

The parent process chooses the worker's environment variables and creates the folder. The worker applies the other restrictions to
itself (``confine``) before it loads anything. Restrictions that the machine does not support are skipped, so ``confine`` returns which
ones are in force.

This module imports only the standard library, because a worker has to start fast.
"""

from __future__ import annotations

import ctypes
import math
import os
import re
import resource
import shutil
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollcall.base.redact import hide_from_proc, is_secret
from rollcall.reward import landlock, seccomp

ROOT = Path(__file__).resolve().parents[2]  # the folder that contains the package
# Paths of programs and libraries, and the language. None of them is a secret.
_KEPT = ("PATH", "LANG", "LANGUAGE", "TZ", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME", "HOME")
_SYSTEM = (
    "/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/localtime", "/dev/null", "/dev/urandom",
    "/dev/random", "/dev/zero", "/proc/cpuinfo", "/proc/meminfo", "/sys/devices/system/cpu",
)  # fmt: skip
# For tracing processes, creating device files and monitoring performance. A process cannot trace one that has more
# capabilities than itself, and containers usually give root only the second of the three.
_CAPABILITIES_TO_LOOK = (19, 27, 38)
_MB = 1 << 20
_RESTRICTED = {
    "files": "only its own folder and Python's files (landlock)", "network": "off (seccomp)", "processes": "none (seccomp)",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Confinement:
    """The limits for a process. Rewards with the same limits share processes."""

    own_files: bool  # can write only to a private folder, and read only Python and system libraries
    network: bool
    env: tuple[str, ...]  # names of the environment variables it gets
    processes: int  # how many processes it may start
    memory_mb: int
    file_mb: int  # size limit for files it writes


BUILT_IN = Confinement(own_files=True, network=False, env=(), processes=0, memory_mb=4096, file_mb=16)


def confinement_of(spec: Mapping[str, Any]) -> Confinement:
    """Return a reward's limits from its fields. Tests may leave out a function's limits."""
    if spec["type"] != "function":
        return BUILT_IN
    return Confinement(
        own_files=False,
        network=spec.get("network", True),
        env=tuple(spec.get("env", ())),
        processes=spec.get("processes", 4096),
        memory_mb=spec.get("memory_mb", 16384),
        file_mb=spec.get("file_mb", 1024),
    )


# The parent's side


def environment(env: Sequence[str], *, folder: str, own_home: bool = False) -> dict[str, str]:
    """Return a worker's environment variables: those in ``_KEPT``, those in ``env``, and thread counts, which default to 1.

    Prevent the worker from reading this process's secrets in ``/proc``.
    """
    environ = os.environ
    hide_from_proc(name for name in environ if is_secret(name) or name in env)
    found = {name: value for name, value in environ.items() if name in _KEPT or name.startswith("LC_")}
    found |= {name: environ.get(name, "1") for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
    found |= {"TMPDIR": folder, "PYTHONDONTWRITEBYTECODE": "1"}
    if own_home:
        found["HOME"] = folder
    if ROOT.name not in ("site-packages", "dist-packages"):  # an installed package is found without this
        found["PYTHONPATH"] = os.pathsep.join(filter(None, [found.get("PYTHONPATH"), str(ROOT)]))
    return found | {name: environ[name] for name in env}


def refuse_unset(names: Iterable[str], *, key: str) -> None:
    """Raise ConfigError if a variable that ``key`` in the run file names is not set in this process."""
    if missing := [name for name in names if name not in os.environ]:
        from rollcall.base.errors import ConfigError  # a worker does not need it

        it, is_not = ("it", "is not") if len(missing) == 1 else ("them", "are not")
        raise ConfigError(
            f"{key} names {', '.join(missing)}, which {is_not} set in the environment; export {it}, or remove {it} from {key}"
        )


def make_folder() -> str:
    """Create a private folder named after its owner. Containers may share /tmp, so the name includes the PID namespace."""
    return tempfile.mkdtemp(prefix=f"rollcall-reward-{_process_space()}-{os.getpid()}-")


def _process_space() -> int:
    return os.stat("/proc/self/ns/pid").st_ino if sys.platform == "linux" else 0


def remove_folder(folder: str) -> None:
    """Remove a private folder, however deeply the folders in it are nested. Warn if that fails."""
    with suppress(RecursionError):
        shutil.rmtree(folder, ignore_errors=True)
    if not os.path.lexists(folder):
        return
    import subprocess  # rarely needed, and a worker has to start fast

    from rollcall.base.wait import warn

    for command in (["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
        subprocess.run([*command, "--", folder], stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if os.path.lexists(folder):
        warn(f"{folder}, a reward's private folder, cannot be removed; remove it yourself")


def sweep_folders() -> None:
    """Remove private folders left by processes that were killed."""
    if sys.platform != "linux":
        return
    try:
        entries = list(os.scandir(tempfile.gettempdir()))
    except OSError:
        return  # creating a folder fails too, and that error is reported
    for entry in entries:
        match = re.fullmatch(r"rollcall-reward-(\d+)-(\d+)-.*", entry.name)
        if match and int(match[1]) == _process_space() and not os.path.exists(f"/proc/{match[2]}"):
            remove_folder(entry.path)


# The worker's side


def confine(confinement: Confinement, *, folder: str, readable: list[str]) -> dict[str, str]:
    """Restrict this process. Return the state of each restriction by name. ``readable`` lists the folders that contain code."""
    # For a user's function, limit only memory it writes to, because GPU libraries reserve address space that they never use.
    memory = resource.RLIMIT_AS if confinement.own_files else resource.RLIMIT_DATA
    told = {
        "memory": limit(memory, confinement.memory_mb * _MB) or f"{confinement.memory_mb} MB",
        "file size": limit(resource.RLIMIT_FSIZE, confinement.file_mb * _MB) or f"{confinement.file_mb} MB",
        "processes": _limit_processes(confinement),
        "files": "the user's own",
        "network": "on",
    }
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    see_no_others()
    if confinement.own_files:
        code = (*_SYSTEM, sys.prefix, sys.base_prefix, sys.exec_prefix, *readable)
        told["files"] = _restricted("files", landlock.restrict(readable=code, writable=[folder]))
        _keep_capabilities(1 << 1 | 1 << 2)  # to access other users' files, which landlock limits to a few folders
        limit(resource.RLIMIT_NOFILE, 256)
    refused = {"network": not confinement.network, "processes": confinement.processes == 0}
    if any(refused.values()):
        why_not = seccomp.refuse(**refused)
        told |= {thing: _restricted(thing, why_not) for thing, is_refused in refused.items() if is_refused}
    return told


def limit_cpu(seconds: float) -> None:
    """Allow this process ``seconds`` more CPU seconds. After that, the kernel kills it, even if its parent is gone. An infinite number
    removes the limit."""
    soft = hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    if seconds < math.inf:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        soft = int(usage.ru_utime + usage.ru_stime + seconds) + 2
        soft = soft if hard == resource.RLIM_INFINITY else min(soft, hard)
    resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


def available() -> dict[str, str]:
    """Return how this machine confines built-in scorers, in the same format as ``confine``."""
    filtered = seccomp.why_missing()
    why_not = {"processes": filtered, "files": landlock.why_missing(), "network": filtered}
    return {thing: _restricted(thing, why) for thing, why in why_not.items()}


def _restricted(thing: str, why_not: str) -> str:
    return f"not restricted ({why_not})" if why_not else _RESTRICTED[thing]


def _limit_processes(confinement: Confinement) -> str:
    """Limit the number of processes. The kernel counts all of the user's processes and threads, so add the existing ones."""
    if confinement.processes == 0:
        return ""  # seccomp refuses them
    if os.geteuid() == 0:
        return "not limited (the kernel does not count root's processes)"
    told = limit(resource.RLIMIT_NPROC, _num_tasks(os.getuid()) + confinement.processes)
    return told or f"at most {confinement.processes}"


def limit(kind: int, most: int) -> str:
    """Set a limit, never above this process's own limit. Return why it failed, or ""."""
    hard = resource.getrlimit(kind)[1]
    most = min(most, sys.maxsize) if hard == resource.RLIM_INFINITY else min(most, hard)
    try:
        resource.setrlimit(kind, (most, most))
    except (OSError, ValueError) as error:
        return f"not limited ({error})"
    return ""


def _num_tasks(uid: int) -> int:
    """Count a user's processes and threads."""
    total = 0
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it exited in the meantime
            if process.stat().st_uid == uid:
                total += len(os.listdir(process / "task"))
    return total


def see_no_others() -> None:
    """Prevent root processes, this one and its children, from reading the memory of root's other processes."""
    if sys.platform == "linux":
        for capability in _CAPABILITIES_TO_LOOK:  # programs that this process starts cannot regain one
            ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP
        _keep_capabilities(~sum(1 << capability for capability in _CAPABILITIES_TO_LOOK))


def _keep_capabilities(kept: int) -> None:
    """Drop all other capabilities of root, such as raising its own limits, creating a device file for a disk or rebooting the machine."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    head = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3 of the structures
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable: first the low 32 bits, then the high 32 bits
    if libc.capget(head, sets) == 0:
        low, high = sets[1] & kept & 0xFFFFFFFF, sets[4] & (kept >> 32) & 0xFFFFFFFF
        libc.capset(head, (ctypes.c_uint32 * 6)(low, low, 0, high, high, 0))

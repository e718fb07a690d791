"""Filters this process's system calls (seccomp). No code in the process can remove the filter.

The kernel runs the filter on every call. Refused calls fail with EPERM, an ordinary PermissionError in Python. The filter
needs no privileges and no library. It supports x86_64 and aarch64 on Linux. ``refuse`` applies to the calling
thread and to threads and processes that it starts later, so call it before any thread starts.

The system call numbers are the kernel's for x86_64 and aarch64. Calls with numbers of 424 and above have the same number on both.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys
from collections.abc import Mapping

# (x86_64, aarch64); None if the architecture does not have the call.
_SENDING = {
    "socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201), "sendto": (44, 206),
    "sendmsg": (46, 211), "sendmmsg": (307, 269),
}  # fmt: skip
# The kernel makes io_uring calls itself, bypassing this filter.
_RINGS = {"io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427)}
_STARTING = {"fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281)}
_CLONE, _CLONE3 = (56, 220), (435, 435)
# Access to the user's other processes: stopping them, reading their memory, taking their open files.
_REACHING = {
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "pidfd_send_signal": (424, 424),
    "pidfd_open": (434, 434), "pidfd_getfd": (438, 438), "process_madvise": (440, 440), "setpriority": (141, 140),
    "ioprio_set": (251, 30), "msgget": (68, 186), "msgctl": (71, 187), "semget": (64, 190), "semctl": (66, 191),
    "mq_open": (240, 180), "mq_unlink": (241, 181),
}  # fmt: skip
# Allowed for this process (first argument 0) and refused for other processes.
_OWN_ALONE = {
    "prlimit64": (302, 261), "sched_setparam": (142, 118), "sched_setscheduler": (144, 119),
    "sched_setaffinity": (203, 122), "sched_setattr": (314, 274),
}  # fmt: skip
# Refused by second argument: operations that make the kernel signal any of the user's processes when there is data to
# read (F_SETOWN, F_SETSIG, F_SETOWN_EX; FIOSETOWN, SIOCSPGRP), or that type on a terminal (TIOCSTI, TIOCLINUX).
_NEVER_WITH = {"fcntl": ((72, 25), (8, 10, 15)), "ioctl": ((16, 29), (0x8901, 0x8902, 0x5412, 0x541C))}
_SIGNALS = {"kill": (62, 129), "tgkill": (234, 131)}
# Changes that landlock does not cover: modes, owners, times, attributes, and the machine itself.
_CHANGING = {
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None),
    "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54), "utimensat": (280, 88), "utime": (132, None),
    "utimes": (235, None), "futimesat": (261, None), "truncate": (76, 45), "setxattr": (188, 5), "lsetxattr": (189, 6),
    "fsetxattr": (190, 7), "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "open_tree": (428, 428),
    "move_mount": (429, 429), "fsopen": (430, 430), "mount_setattr": (442, 442), "open_by_handle_at": (304, 265),
    "unshare": (272, 97), "setns": (308, 268), "bpf": (321, 280), "userfaultfd": (323, 282),
    "perf_event_open": (298, 241), "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106), "kexec_load": (246, 104),
    "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "syslog": (103, 116), "reboot": (169, 142),
    "fsmount": (432, 432), "fspick": (433, 433), "kexec_file_load": (320, 294),
}  # fmt: skip

_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column in the tables above, AUDIT_ARCH_*
_X32 = 0x40000000  # marks system calls of the x32 ABI
_AF_UNIX, _CLONE_THREAD = 1, 0x00010000
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _MODE_FILTER = 38, 22, 2
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_LOAD, _IF_EQUAL, _IF_AT_LEAST, _IF_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
# Offsets in struct seccomp_data; both architectures are little-endian.
_NUMBER_AT, _ARCH_AT, _FIRST_ARGUMENT_AT, _SECOND_ARGUMENT_AT = 0, 4, 16, 24

Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, value


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


def why_missing() -> str:
    """Return why this machine cannot filter system calls, or ""."""
    if sys.platform != "linux":
        return f"{sys.platform} has no seccomp"
    if platform.machine() not in _ARCHITECTURES:
        return f"Rollcall has no list of system calls for {platform.machine()}"
    if not os.path.exists("/proc/sys/kernel/seccomp/actions_avail"):
        return "the kernel has no seccomp filter"
    return ""


def refuse(*, network: bool, processes: bool) -> str:
    """Refuse ``network`` (all sockets except Unix sockets) and ``processes`` (starting processes, accessing other processes,
    all sockets, and file changes that landlock does not cover). Return why this failed, or ""."""
    if missing := why_missing():
        return missing
    program = _program(network=network, processes=processes)
    packed = b"".join(struct.pack("<HBBI", *instruction) for instruction in program)
    memory = ctypes.create_string_buffer(packed, len(packed))
    libc = ctypes.CDLL(None, use_errno=True)
    filter_ = _Program(len(program), ctypes.cast(memory, ctypes.c_void_p))
    if no_new_privileges() or libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(filter_), 0, 0):
        return f"the kernel refused a seccomp filter: {os.strerror(ctypes.get_errno())}"
    return ""


def no_new_privileges() -> int:
    """Prevent set-uid programs from gaining rights, as seccomp and landlock require. Return 0 on success."""
    return ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def _program(*, network: bool, processes: bool) -> list[Instruction]:
    column, architecture = _ARCHITECTURES[platform.machine()]
    refuse_it, allow = (_RETURN, 0, 0, _ERRNO | errno.EPERM), (_RETURN, 0, 0, _ALLOW)
    program = [
        (_LOAD, 0, 0, _ARCH_AT), (_IF_EQUAL, 1, 0, architecture), refuse_it,
        (_LOAD, 0, 0, _NUMBER_AT), (_IF_AT_LEAST, 0, 1, _X32), refuse_it,
    ]  # fmt: skip

    def never(calls: Mapping[str, tuple[int | None, int | None]]) -> None:
        for number in (numbers[column] for numbers in calls.values()):
            if number is not None:
                program.extend([(_IF_EQUAL, 0, 1, number), refuse_it])

    def only(number: int, *, test: int, value: int) -> None:
        """Allow a call only if its first argument passes the test."""
        load = (_LOAD, 0, 0, _FIRST_ARGUMENT_AT)
        program.extend([(_IF_EQUAL, 0, 4, number), load, (test, 1, 0, value), refuse_it, allow])

    def never_with(number: int, values: tuple[int, ...]) -> None:
        """Refuse a call if its second argument is one of the values."""
        tests = [step for value in values for step in ((_IF_EQUAL, 0, 1, value), refuse_it)]
        body = [(_LOAD, 0, 0, _SECOND_ARGUMENT_AT), *tests, allow]
        program.extend([(_IF_EQUAL, 0, len(body), number), *body])

    if processes:
        for calls in (_SENDING, _STARTING, _REACHING, _CHANGING):
            never(calls)
        only(_CLONE[column], test=_IF_ANY_BIT, value=_CLONE_THREAD)
        # clone3's flags are in memory, which a filter cannot read. If clone3 fails with ENOSYS, libc uses clone instead.
        program.extend([(_IF_EQUAL, 0, 1, _CLONE3[column]), (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)])
        for numbers in _SIGNALS.values():
            only(numbers[column], test=_IF_EQUAL, value=os.getpid())
        for numbers in _OWN_ALONE.values():
            only(numbers[column], test=_IF_EQUAL, value=0)
        for numbers, values in _NEVER_WITH.values():
            never_with(numbers[column], values)
    elif network:
        only(_SENDING["socket"][column], test=_IF_EQUAL, value=_AF_UNIX)
    never(_RINGS)
    return [*program, allow]

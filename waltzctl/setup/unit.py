"""Units for systemd, as texts made from values. Pure.

A unit says three things: what is run and as whom, what becomes of it when it ends, and what it may touch. The first two
follow from the configuration of the daemon, so that nobody has to keep a file system path or a deadline in two places. The
third is the same for all: a daemon of Waltz needs its directory, its ports, and nothing else of the machine.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath

from waltzd.errors import EXIT_DISK_FAULT, EXIT_FINDINGS, EXIT_UNSAFE, EXIT_USAGE

DEFAULT_PROGRAM = "/opt/waltz/bin/waltzd"
DEFAULT_USER = "waltz"
STATE_HOME = PurePosixPath("/var/lib")
HOMES = (PurePosixPath("/home"), PurePosixPath("/root"))
STOP_MARGIN_SECONDS = 60
"""Beyond `drain_seconds`: what was queued is written, and documents in the coordinator are changed."""
DISK_FAULT_SECONDS = 60
HELPLESS = (EXIT_USAGE, EXIT_UNSAFE, EXIT_FINDINGS)
"""To start again cannot help: the configuration is wrong, an operator has to decide, or files are damaged."""

_FORBIDDEN = re.compile(r"[\s\"'\\:;$]")


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a unit is made for."""

    kind: str
    """storage, server or zookeeper"""
    program: str = DEFAULT_PROGRAM
    user: str = DEFAULT_USER
    config: str = ""
    """Of a storage or a server."""
    directory: str | None = None
    """Where it writes; a server writes nowhere."""
    drain_seconds: int = 0
    reads: tuple[str, ...] = ()
    """Other files that it has to see."""
    listen: str = "127.0.0.1:2181"
    """Of a ZooKeeper."""


def unfit(text: str) -> bool:
    """Whether a path or name would mean something else in a unit."""
    return not text or not text.isprintable() or _FORBIDDEN.search(text) is not None


def unit(wanted: Wanted, *, command: str) -> str:
    """The file. `command`: how it was made, for whoever wants to make it again."""
    parts = {
        "Unit": [_COMMENT[wanted.kind].format(command=command), *_unit(wanted)],
        "Service": [*_running(wanted), "", *_ending(wanted), "", *_limits(), "", *_confinement(wanted)],
        "Install": ["WantedBy=multi-user.target"],
    }
    head, *lines = parts["Unit"]
    sections = [head, "\n".join(["[Unit]", *lines])]
    sections += ["\n".join([f"[{name}]", *parts[name]]) for name in ("Service", "Install")]
    return "\n\n".join(sections) + "\n"


_COMMENT = {
    "storage": "# A storage of Waltz. Made by `{command}`; see docs/operating-daemons.md.",
    "server": "# A server of Waltz. Made by `{command}`; see docs/operating-daemons.md.",
    "zookeeper": (
        "# One ZooKeeper, to try Waltz out with. Made by `{command}`.\n"
        "# It takes connections of this machine only; a cluster that people rely on needs an ensemble of three or five."
    ),
}
_MEANING = {
    "storage": "Waltz storage: keeps replicas of partitions",
    "server": "Waltz server: owns partitions",
    "zookeeper": "ZooKeeper for a Waltz on this machine",
}


def _unit(wanted: Wanted) -> list[str]:
    lines = [f"Description={_MEANING[wanted.kind]}", "Wants=network-online.target"]
    after = ["network-online.target"]
    if wanted.kind == "server":  # only an order, where they are on one machine: a server waits for them by itself
        after += ["waltz-zookeeper.service", "waltz-storage.service"]
    return [
        *lines,
        f"After={' '.join(after)}",
        *([f"RequiresMountsFor={_escaped(wanted.directory)}"] if wanted.directory is not None else []),
        "# What it lacks, a disk or a coordinator, may come back after hours: it is started again for as long as it takes.",
        "StartLimitIntervalSec=0",
    ]


def _running(wanted: Wanted) -> list[str]:
    if wanted.kind == "zookeeper":
        directory = _escaped(str(wanted.directory))
        what = [
            "Type=exec",
            f"ExecStart={_escaped(wanted.program)} zookeeper --directory {directory} --listen {wanted.listen}",
        ]
    else:
        what = [
            "Type=notify",
            "NotifyAccess=main",
            f"ExecStart={_escaped(wanted.program)} {wanted.kind} --config {_escaped(wanted.config)}",
            "# Certificates are read again; connections stay.",
            "ExecReload=/bin/kill -HUP $MAINPID",
        ]
    return [*what, f"User={wanted.user}", *_places(wanted)]


def _places(wanted: Wanted) -> list[str]:
    """The directory that it may write to: one that systemd makes for it, or one that is there."""
    if wanted.directory is None:  # a server: only the lines that it logged last
        return ["StateDirectory=waltz-server", "StateDirectoryMode=0700"]
    path = PurePosixPath(wanted.directory)
    if STATE_HOME in path.parents:
        name = _escaped(str(path.relative_to(STATE_HOME)))
        return [f"StateDirectory={name}", "StateDirectoryMode=0700"]
    return ["# It has to be there, and to belong to that user.", f"ReadWritePaths={_escaped(wanted.directory)}"]


def _ending(wanted: Wanted) -> list[str]:
    lines = ["Restart=on-failure", "RestartSec=5s"]
    if wanted.kind == "zookeeper":
        return [*lines, "# What a JVM ends with after SIGTERM.", "SuccessExitStatus=143", "TimeoutStopSec=60s"]
    lines += [
        "# The configuration is wrong, an operator has to decide, or files are damaged: to start again would not help.",
        f"RestartPreventExitStatus={' '.join(map(str, HELPLESS))}",
    ]
    if wanted.kind == "storage":
        wait = f'if [ "$$EXIT_STATUS" = {EXIT_DISK_FAULT} ]; then exec sleep {DISK_FAULT_SECONDS}; fi'
        lines += [
            "# After a failed flush or write the disk is given some time.",
            f"ExecStopPost=/bin/sh -c '{wait}'",
            "# To open many partitions takes its time; what it does is in `systemctl status`.",
            "TimeoutStartSec=30min",
        ]
    else:
        lines += ["TimeoutStartSec=5min"]
    stop = max(wanted.drain_seconds + STOP_MARGIN_SECONDS, 2 * DISK_FAULT_SECONDS if wanted.kind == "storage" else 0)
    return [
        *lines,
        f"# drain_seconds is {wanted.drain_seconds}; what was queued is written after that.",
        f"TimeoutStopSec={stop}s",
        "# A daemon that lives and does nothing is ended with SIGABRT; every thread's stack is in its log then.",
        f"WatchdogSec={'60s' if wanted.kind == 'storage' else '30s'}",
    ]


def _limits() -> list[str]:
    return ["# Segments, indexes and connections are files.", "LimitNOFILE=65536", "UMask=0077"]


def _confinement(wanted: Wanted) -> list[str]:
    is_java = wanted.kind == "zookeeper"
    paths = [PurePosixPath(path) for path in (wanted.program, wanted.config, wanted.directory or "", *wanted.reads)]
    in_homes = any(home in path.parents for path in paths for home in HOMES)
    return [
        "NoNewPrivileges=true",
        "CapabilityBoundingSet=",
        "AmbientCapabilities=",
        "ProtectSystem=strict",
        f"ProtectHome={'read-only' if in_homes else 'true'}",
        "PrivateTmp=true",
        "PrivateMounts=true",
        "PrivateDevices=true",
        "PrivateUsers=true",
        "DevicePolicy=closed",
        "ProtectClock=true",
        "ProtectControlGroups=true",
        "ProtectHostname=true",
        "ProtectKernelLogs=true",
        "ProtectKernelModules=true",
        "ProtectKernelTunables=true",
        "ProtectProc=invisible",
        *([] if is_java else ["ProcSubset=pid"]),  # Java asks the kernel how much memory there is
        "RemoveIPC=true",
        "RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX",
        *(["IPAddressDeny=any", "IPAddressAllow=localhost"] if is_java else []),
        "RestrictNamespaces=true",
        "RestrictRealtime=true",
        "RestrictSUIDSGID=true",
        "LockPersonality=true",
        *([] if is_java else ["MemoryDenyWriteExecute=true"]),  # Java compiles while it runs
        "SystemCallArchitectures=native",
        "SystemCallFilter=@system-service",
        "SystemCallFilter=~@privileged @resources",
        "SystemCallErrorNumber=EPERM",
    ]


def _escaped(text: str) -> str:
    """A percent sign would be a specifier."""
    return text.replace("%", "%%")

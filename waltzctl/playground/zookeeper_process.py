"""`waltzd zookeeper`: one ZooKeeper on this machine, for demonstrations, development and tests.

It is ZooKeeper itself, with its settings and its data in one directory: this process writes the settings, takes the
directory for itself, and becomes Java. What is on its disk outlives every kind of stop. It has no passwords and no second
copy, so it listens on this machine only; a cluster that people rely on needs an ensemble of three or five.
"""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path
from typing import NoReturn

from waltzctl.playground.java import find_java, zookeeper_jars
from waltzd.errors import BadArgument, DirectoryHeld, PortInUse
from waltzd.protocol.address import Address

HEAP = "256m"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
MAIN = "org.apache.zookeeper.server.quorum.QuorumPeerMain"

_SETTINGS = """\
# Written by `waltzd zookeeper` at every start.
dataDir=./data
clientPort={port}
clientPortAddress={host}
# Coordinator sessions may last from 1 to 60 seconds; they end at a multiple of a tick.
tickTime=500
minSessionTimeout=1000
maxSessionTimeout=60000
maxClientCnxns=0
admin.enableServer=false
4lw.commands.whitelist=srvr
# Snapshots to keep, and how often (in hours) older ones are removed.
autopurge.snapRetainCount=3
autopurge.purgeInterval=1
"""

_LOGGING = """\
# Written by `waltzd zookeeper` at every start.
status = error
appender.file.type = RollingFile
appender.file.name = file
appender.file.fileName = zookeeper.log
appender.file.filePattern = zookeeper.log.%i
appender.file.layout.type = PatternLayout
appender.file.layout.pattern = %d{yyyy-MM-dd'T'HH:mm:ss.SSSXXX} %p %c{1}: %m%n
appender.file.policies.type = Policies
appender.file.policies.size.type = SizeBasedTriggeringPolicy
appender.file.policies.size.size = 10MB
appender.file.strategy.type = DefaultRolloverStrategy
appender.file.strategy.max = 3
rootLogger.level = info
rootLogger.appenderRef.file.ref = file
"""


def run(directory: str, listen: Address) -> NoReturn:
    """Become ZooKeeper."""
    if listen.host not in LOOPBACK or listen.port == 0:
        raise BadArgument(
            f"ZooKeeper cannot listen on {listen} here: it has no passwords, so it takes an address of this machine only, "
            "like 127.0.0.1:2181"
        )
    command = java_command()
    try:
        Path(directory, "data").mkdir(mode=0o700, parents=True, exist_ok=True)
        _hold(directory)
        _check_port(listen)
        write_settings(directory, listen)
    except OSError as error:
        raise BadArgument(f"ZooKeeper cannot use the directory {directory}: {error.strerror}") from error
    print(f"waltzd zookeeper starts: listen={listen} directory={directory} java={command[0]}", flush=True)
    os.chdir(directory)
    os.execv(command[0], command)


def java_command() -> list[str]:
    """Runs ZooKeeper with the settings in the working directory."""
    return [
        os.path.abspath(find_java().program), f"-Xmx{HEAP}", "-XX:+UseSerialGC", "-XX:+ExitOnOutOfMemoryError",
        "-Dzookeeper.preAllocSize=4096", "-Dlog4j.configurationFile=log4j2.properties",
        "-cp", ":".join(zookeeper_jars()), MAIN, "./zoo.cfg",
    ]  # fmt: skip


def write_settings(directory: str, listen: Address) -> None:
    """Names in the settings are relative, so that the directory can have any name and be moved."""
    Path(directory, "zoo.cfg").write_text(_SETTINGS.format(host=listen.host, port=listen.port), encoding="ascii")
    Path(directory, "log4j2.properties").write_text(_LOGGING, encoding="ascii")


def _hold(directory: str) -> None:
    """ZooKeeper itself does not notice a second one on its data. The lock goes over to Java, and ends with it."""
    held = os.open(Path(directory, "lock"), os.O_RDWR | os.O_CREAT, 0o600)
    os.set_inheritable(held, True)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(held)
        raise DirectoryHeld(f"another ZooKeeper runs on {directory}") from error


def _check_port(listen: Address) -> None:
    """Java would say it in its log only."""
    family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((listen.host, listen.port))
        except OSError as error:
            raise PortInUse(f"ZooKeeper cannot listen on {listen}: {error.strerror}") from error

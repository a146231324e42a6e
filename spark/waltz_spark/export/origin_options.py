"""Make the origin that the options of a reading name.

One of three options says where the log is: `path` (directories of storages), `bootstrap.servers` (addresses of servers) or
`coordinator` (addresses of ZooKeeper). `archive` names the archive of the cluster beside one of the last two. Spark hands
over the names of options in lower case, so case is ignored. An unknown name is refused, with the nearest known one: a
misspelt limit would read everything.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from waltz_spark.export.manifest import HIDDEN
from waltz_spark.log import plan, selection
from waltz_spark.log.origin import Origin
from waltzd.archive.location import directory_of
from waltzd.archive.manifest import LABEL
from waltzd.disk.real import RealDisk
from waltzd.disk.seam import Disk, join
from waltzd.errors import BadArgument
from waltzd.errors.operations import NothingHere, PathMissing
from waltzd.format.layout import CONTROL_NAME, SEGMENT_SUFFIX

if TYPE_CHECKING:
    from waltz_spark.log.live_origin import LiveOrigin

PATH, PATHS, ALLOW_UNCOMMITTED = "path", "paths", "allowUncommitted"
ARCHIVE = "archive"
SERVERS, STORAGES, COORDINATOR, ROOT = "bootstrap.servers", "storages", "coordinator", "root"
TLS_CERTIFICATE, TLS_KEY, TLS_CA = "tlsCertificate", "tlsKey", "tlsCa"
COORDINATOR_TLS, COORDINATOR_TLS_CA = "coordinatorTls", "coordinatorTlsCa"
COORDINATOR_TLS_CERTIFICATE, COORDINATOR_TLS_KEY = "coordinatorTlsCertificate", "coordinatorTlsKey"
COORDINATOR_CREDENTIALS = "coordinatorCredentials"
RATE = "maxBytesPerSecond"
_PLACES = (PATH, SERVERS, COORDINATOR)
_OF_DIRECTORIES = (PATH, PATHS, ALLOW_UNCOMMITTED)
_OF_COORDINATORS = {
    COORDINATOR_TLS: "how", COORDINATOR_TLS_CERTIFICATE: "certificate", COORDINATOR_TLS_KEY: "key",
    COORDINATOR_TLS_CA: "ca", COORDINATOR_CREDENTIALS: "credentials",
}  # fmt: skip
"""Options about the way to ZooKeeper, with the arguments of `load_credentials`."""
_OF_CLUSTERS = (
    ARCHIVE, SERVERS, STORAGES, COORDINATOR, ROOT, TLS_CERTIFICATE, TLS_KEY, TLS_CA, *_OF_COORDINATORS, RATE,
)  # fmt: skip
_OF_READERS = ("columns", "includeMetadata", "lock", "maxTxnsPerTrigger", "maxBytesPerTrigger")
"""Options that `waltz_spark.source` handles."""
OPTIONS = (*_OF_DIRECTORIES, *_OF_CLUSTERS, *selection.OPTIONS, *plan.OPTIONS, *_OF_READERS)
_ELSEWHERE = {"assign": "partitions", "subscribe": "partitions", "directory": PATH, "servers": SERVERS,
              "zookeeper": COORDINATOR}  # fmt: skip
"""Names of options in other data sources and tools, with the name here."""
DEFAULT_ROOT = "/waltz"
_NOT_READ = "nothing was read"


def given_options(options: Mapping[str, str], known: Collection[str] = OPTIONS) -> dict[str, str]:
    """Return options by names in lower case; raise for an unknown name, and for two different values of one."""
    canonical = {name.lower(): name for name in known}
    found: dict[str, str] = {}
    for name, value in options.items():
        low = name.lower()
        if low not in canonical:
            raise BadArgument(f"there is no option {name}", not_done=_NOT_READ, next_step=_instead_of(low, canonical))
        if low in found and found[low] != value:
            raise BadArgument(
                f"the option {canonical[low]} was given twice: {found[low]!r} and {value!r}", not_done=_NOT_READ
            )
        found[low] = value
    return found


def _instead_of(name: str, canonical: Mapping[str, str]) -> str:
    if name == "verify":
        return "leave it out: every record's checksum is checked, always"
    other = _ELSEWHERE.get(name, "").lower()
    near = [low for low in canonical if low.startswith(name) or low == other]
    near = near or difflib.get_close_matches(name, canonical, n=1)
    return f"did you mean {canonical[near[0]]}?" if near else f"there are: {', '.join(sorted(canonical.values()))}"


def open_origin(options: Mapping[str, str], *, disk: Disk | None = None) -> Origin:
    """Return the origin that options name. Nothing is sent to a cluster, and only the kind of files is examined."""
    given = given_options(options)
    if PATHS in given:
        if PATH in given:
            raise BadArgument(f"{PATH} and {PATHS} name places twice", not_done=_NOT_READ, next_step="say one of them only")
        given[PATH] = given.pop(PATHS)
    named = [name for name in _PLACES if given.get(name, "").strip()]
    archive = given.get(ARCHIVE, "").strip()
    if archive and not named:
        raise _archive_alone(archive)
    if len(named) != 1:
        raise BadArgument(
            f"{' and '.join(named)} name {len(named)} places to read from" if named else "nothing says what to read",
            not_done=_NOT_READ,
            next_step=f"give one of {', '.join(_PLACES)}",
        )
    foreign = [name for name in (_OF_CLUSTERS if named == [PATH] else _OF_DIRECTORIES) if name.lower() in given]
    if foreign:
        raise BadArgument(
            f"the option {foreign[0]} makes no sense with {named[0]}",
            not_done=_NOT_READ,
            next_step=f"leave {foreign[0]} out",
        )
    if named == [PATH]:
        return _files(given, disk or RealDisk())
    if not archive:
        return _cluster(given)
    from waltz_spark.log.archive_segments import ArchiveSegments
    from waltz_spark.log.live_origin import JoinedOrigin

    directory = directory_of(archive)  # tasks may run in another directory
    segments = ArchiveSegments(place=archive if directory is None else directory)
    return JoinedOrigin(archive=segments, live=_cluster(given))


def _archive_alone(place: str) -> BadArgument:
    return BadArgument(
        f"reading an archive without its cluster was removed: {place}",
        not_done=_NOT_READ,
        next_step=f"name the cluster as well, by {COORDINATOR} or {SERVERS} (for the command: a context and --archive); "
        f"if the cluster is gone, `waltzctl cluster restore {place}`, and read the restored one",
    )


# -- files -------------------------------------------------------------------------------------------------------------


def _files(given: Mapping[str, str], disk: Disk) -> Origin:
    from waltz_spark.log.directory_origin import DirectoryOrigin

    text = given.get(ALLOW_UNCOMMITTED.lower())
    allows = False if text is None else selection.truth_of(ALLOW_UNCOMMITTED, text)
    places = paths_of(given[PATH])
    for place in places:
        if "://" not in place and disk.exists(join(place, LABEL)):
            raise _archive_alone(place)
        if "://" in place or disk.exists(join(place, HIDDEN)):
            raise BadArgument(
                f"{PATH}: {place} is no directory of a storage",
                not_done=_NOT_READ,
                next_step="read an export with spark.read.parquet(…), and an archive beside its cluster: option "
                f"{ARCHIVE}, or --archive of the command",
            )
    storages = [storage for place in places for storage in _storages(disk, place)]
    if len(set(storages)) < len(storages):
        raise BadArgument(f"{PATH} names a directory twice", not_done=_NOT_READ)
    return DirectoryOrigin(storages=tuple(storages), allows_uncommitted=allows, disk=disk)


def paths_of(text: str) -> list[str]:
    """Parse one path, or several as JSON, as Spark passes them."""
    if not text.lstrip().startswith("["):
        return [_plain(text)]
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadArgument(f"{PATH} starts like a list and is no JSON: {text!r}", not_done=_NOT_READ) from error
    if not found or not all(isinstance(place, str) and place for place in found):
        raise BadArgument(f"{PATH} has to be a list of paths, not {text!r}", not_done=_NOT_READ)
    return [_plain(place) for place in found]


def _plain(place: str) -> str:
    for prefix in ("file://", "file:"):
        if place.startswith(prefix):
            place = place.removeprefix(prefix)
            break
    return place if "://" in place else os.path.abspath(place)  # tasks may run in another directory


def _storages(disk: Disk, place: str) -> list[str]:
    """Return the directory, or the storages in it, as in a cluster of `waltzctl up`."""
    if not disk.exists(place):
        raise PathMissing(f"{PATH}: {place} does not exist")
    if disk.exists(join(place, CONTROL_NAME)):
        return [place]
    inner = [join(place, entry.name) for entry in disk.list(place) if entry.is_directory]
    found = [home for path in inner for home in (path, join(path, "data")) if disk.exists(join(home, CONTROL_NAME))]
    if found:
        return found
    if any(name.endswith(SEGMENT_SUFFIX) for path in inner for name in disk.names(path)):
        return [place]  # partitions without a storage: the origin asks for `allowUncommitted`
    raise NothingHere(
        f"{PATH}: {place} holds no storage",
        not_done=_NOT_READ,
        next_step="give the directory of a storage, or one that holds several",
    )


# -- clusters ----------------------------------------------------------------------------------------------------------


def _cluster(given: Mapping[str, str]) -> LiveOrigin:
    from waltz_spark.log.live_origin import Certificate, LiveOrigin
    from waltzd.client.routes import addresses_of

    files = {name: given.get(name.lower()) for name in (TLS_CERTIFICATE, TLS_KEY, TLS_CA)}
    missing = [name for name, path in files.items() if not path]
    if 0 < len(missing) < len(files):
        raise BadArgument(f"{' and '.join(missing)} missing: a certificate needs all three of {', '.join(files)}",
                          not_done=_NOT_READ)  # fmt: skip
    certificate, key, ca = files.values()
    rate = given.get(RATE.lower())
    coordinator = given.get(COORDINATOR)
    if coordinator is None and ROOT in given:
        raise BadArgument(f"{ROOT} is where the cluster is in ZooKeeper; say {COORDINATOR}, too", not_done=_NOT_READ)
    access = {argument: given[name.lower()] for name, argument in _OF_COORDINATORS.items() if given.get(name.lower())}
    if ("certificate" in access) != ("key" in access):
        words = f"{COORDINATOR_TLS_CERTIFICATE} and {COORDINATOR_TLS_KEY} go together, and one of them is missing"
        raise BadArgument(words, not_done=_NOT_READ)
    if coordinator is None and access:
        words = f"{', '.join(_OF_COORDINATORS)} say how ZooKeeper is reached; say {COORDINATOR}, too"
        raise BadArgument(words, not_done=_NOT_READ)
    storages = given.get(STORAGES)
    if coordinator is not None and storages is not None:
        raise BadArgument(f"{STORAGES} makes no sense with {COORDINATOR}, which knows them", not_done=_NOT_READ)
    return LiveOrigin(
        servers=addresses_of(given[SERVERS]) if SERVERS in given else (),
        storages=addresses_of(storages) if storages is not None else (),
        coordinator=coordinator,
        root=given.get(ROOT, DEFAULT_ROOT),
        access=access,
        certificate=Certificate(certificate, key, ca) if certificate and key and ca else None,
        bytes_per_second=plan.size_of(RATE, rate) if rate is not None else None,
    )

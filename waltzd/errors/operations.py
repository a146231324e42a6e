"""Errors that no application handles by their class: those of daemons, tools, disks and certificates. And the table of
all codes.

People read them in logs and in the output of commands. An error crosses the wire as its code and its parts
(`waltzd.wire.codec`), and is raised on the other side in its class; so `tree` is here, where every class is loaded."""

from __future__ import annotations

from waltzd.errors import (
    EXIT_CONFLICT,
    EXIT_DISK_FAULT,
    EXIT_FINDINGS,
    EXIT_MEANING,
    EXIT_NOT_AUTHORISED,
    EXIT_NOT_FOUND,
    EXIT_PARTIAL,
    EXIT_TIMEOUT,
    EXIT_UNHEALTHY,
    EXIT_UNSAFE,
    EXIT_USAGE,
    CannotConnect,
    Retry,
    WaltzError,
    explain,
)

# -- what the operator gave us -----------------------------------------------------------------------------------------


class BadConfig(WaltzError, code="W1002", exit_code=EXIT_USAGE):
    """The configuration file cannot be read, is not YAML, or has an unknown key or a value out of bounds. The message
    names the key. Not done: the daemon was not started. Next: correct the file and start again; `--check-config` checks
    it without starting."""


class PathMissing(WaltzError, code="W1003", exit_code=EXIT_USAGE):
    """A path that was given on the command line does not exist on this machine. Not done: nothing was read or changed.
    Next: check the path for a typing mistake."""


class NoPermission(WaltzError, code="W1005"):
    """The operating system did not permit opening a file or directory. Not done: nothing was changed. Next: run as the
    user that owns the storage directory."""


class NotInstalled(WaltzError, code="W2032"):
    """A program or a Python package that is needed here is not installed, or is too old. `pip install waltzd` brings what
    applications need; the programs and whatever else stands on more come with extras of the package: `tools` for
    `waltzctl`, `daemon` for `waltzd`, `local` for a cluster on one machine (ZooKeeper, whose program files the package
    PySpark ships, and a Java 17 or later), `spark` for the data source and exports, `delta` for Delta tables. The message
    says what was tried and what was wrong with it, and the fact `extra` names the extra. A ZooKeeper that is installed in
    another way needs nothing from Waltz: start it and name its address. Not done: nothing was started, read or written.
    Next: install what the message names."""

    def __init__(self, message: str, *, not_done: str = "", next_step: str = "", **facts: object) -> None:
        if "extra" in facts and not next_step:
            next_step = f"`pip install 'waltzd[{facts['extra']}]'`, which brings it"
        super().__init__(message, not_done=not_done, next_step=next_step, **facts)


class NothingHere(WaltzError, code="W1004"):
    """A directory that was given holds no Waltz data: no control file, no partition and no segment. So nothing can be
    reported about it. Not done: nothing was checked. Next: give a storage directory, one of its partition directories,
    or a segment file."""


class NotRegularFile(WaltzError, code="W1006", exit_code=EXIT_USAGE):
    """A path that must be a plain file or directory is a link, a device or something else. Waltz does not follow links
    in its storage directory, because two partitions could share the same bytes through them. Not done: nothing was read
    or changed. Next: give the path of the real file or directory."""


class WorkerLost(WaltzError, code="W1007"):
    """A worker process of a command ended before its work was done: it was killed, or ran out of memory. The command
    stopped, and nothing incomplete is in use. Not done: the command did not finish. Next: run it again; use --jobs 1 if
    memory is short."""


# -- sessions and the replica protocol ---------------------------------------------------------------------------------


class BadFrame(WaltzError, code="W2006", status="INVALID_ARGUMENT"):
    """A message breaks the protocol: columns of different lengths, a wrong checksum, a field out of bounds, or a
    missing first message. Only that call ended. Not done: nothing of this message was written. Next: this is an error
    in the sender, or damage on the way; send the records again."""


class StaleSession(WaltzError, code="W2001", retry=Retry.ELSEWHERE, status="ABORTED"):
    """A newer owner has opened this partition on the storage, which rejects all calls of older sessions from then on.
    The server that gets this error closes its session at once, because it is no longer the owner. Not done: nothing was
    written. Next: close this session; if this server still owns the partition, open a new session with a higher id."""


class NotOwner(WaltzError, code="W2003", exit_code=EXIT_CONFLICT, retry=Retry.ELSEWHERE, status="FAILED_PRECONDITION"):
    """The server does not own the partition, or owns it under another generation than the caller names. The facts name
    the owner if it is known; the client asks there, or looks the owner up again. Not done: nothing was read or written.
    Next: look up the owner of the partition and ask there."""


class NotNextId(WaltzError, code="W2004", status="FAILED_PRECONDITION"):
    """An append did not start at the next transaction id of the replica. Logs have no gaps, so it was rejected. The
    fact `next_id` is the next id of the replica. Not done: nothing of this append was written. Next: send the records
    from the replica's next id on."""


class Diverged(WaltzError, code="W2005", status="FAILED_PRECONDITION"):
    """An append has an id that the replica already holds with other bytes. A record is never rewritten. The replica and
    the sender have different histories; recovery must decide before anything is appended. Not done: nothing was
    written; the replica keeps what it has. Next: close the session and recover the partition."""


class GroupStateDamaged(WaltzError, code="W2301", status="DATA_LOSS"):
    """An entry of the group log cannot be decoded: a newer version wrote it, or it contradicts earlier entries. Groups
    deliver nothing, because a guess at their state could skip a transaction. Not done: nothing was delivered. Next:
    bring all servers to the newest version; if the error remains, report it, and skip the entry with `waltzctl group
    resume --pass-over ENTRY`."""


class GroupLogClosed(WaltzError, code="W2302", exit_code=EXIT_NOT_AUTHORISED, status="PERMISSION_DENIED"):
    """The partition after the last one is the group log. It holds the state of every consumer group, and only servers
    may use it; applications use groups through the calls for them. A server in turn is a client of the group log only,
    so its certificate opens no other partition. Not done: nothing was read or written. Next: name a partition of the
    cluster; `waltzctl status` says how many there are."""


class GroupLogRefused(WaltzError, code="W2303", exit_code=EXIT_UNSAFE, retry=Retry.LATER):
    """The group log cannot be created now: a server or storage does not answer, or its version is too old for a group
    log. An old server would also stop following the assignment of partitions. Not done: nothing was changed. Next:
    start what the message names, upgrade it, or remove it from the cluster; then try again."""


class PartitionOffline(WaltzError, code="W2008", retry=Retry.LATER, status="UNAVAILABLE"):
    """An operator took this partition offline on this storage. Appends and session reads are refused until it is set
    available again; its files are unchanged. Not done: nothing was read or written. Next: set the partition available
    again on this storage."""


class BelowFloor(WaltzError, code="W2009", exit_code=EXIT_UNSAFE, status="FAILED_PRECONDITION"):
    """A truncation would cut records that are known to be committed (below the low-water mark or the committed mark),
    or came after the session had set its low-water mark. It is always refused. Not done: nothing was cut. Next: this
    replica may hold the only copy; recover the partition from the other replicas instead."""


class NotOpened(WaltzError, code="W2010", status="FAILED_PRECONDITION"):
    """A call used a session that was not opened on this partition, or an earlier opening: the replica was opened again
    since, was truncated, or has started its session. Only `Open` raises the session of a replica, and each one ends the
    append streams, segment files and running calls of earlier ones. So a caller that opens a replica again after a
    timeout can rely on the answer. Not done: nothing was done for the call. Next: open the replica first, or again; the
    owner of a partition does so automatically."""


class SessionTooFar(WaltzError, code="W2041", exit_code=EXIT_UNSAFE, status="FAILED_PRECONDITION"):
    """A caller opened a session far above every session that this replica knows. Sessions are counted one by one, so
    such a number is a mistake or an attack, and obeying it would lock out every real owner. Not done: nothing was
    changed; the sessions that were promised before go on. Next: find out which server opened it; a partition whose sessions
    really are that far needs `waltzctl partition rescue`."""


class PartitionExists(WaltzError, code="W2012", exit_code=EXIT_CONFLICT, status="ALREADY_EXISTS"):
    """The storage already has a replica of this partition, so it cannot be created there. Not done: nothing was
    changed. Next: nothing, if it is meant to be there; remove it first to start with an empty one."""


class MarkWentDown(WaltzError, code="W2014", exit_code=EXIT_CONFLICT, status="FAILED_PRECONDITION"):
    """A low-water mark or session id would have decreased. Both only rise. Not done: nothing was changed. Next: read
    the partition's marks and send values at or above them."""


class Draining(WaltzError, code="W2015", retry=Retry.LATER, status="UNAVAILABLE"):
    """The daemon is shutting down and accepts no new calls. What it acknowledged is on disk. Not done: this call was
    not started. Next: try again when the storage is back."""


class SessionEnded(WaltzError, code="W2016", retry=Retry.ELSEWHERE, status="ABORTED"):
    """The owner's session on this partition ended: a newer owner took over, a replica joined or left, or the partition
    is being handed over. Requests without an answer may be in the log or not; the next mount reports which. Not done:
    requests without an answer are undecided until the next mount. Next: mount the partition again; the client library
    does so by itself."""


class MetadataMissing(WaltzError, code="W2020", exit_code=EXIT_UNSAFE):
    """The coordinator has no document of a partition whose storages hold data or have served sessions. Starting from
    nothing would erase that data. Either the metadata was deleted, or these storages belong to an older cluster. Not
    done: nothing was cut, nothing was written. Next: put the newest copy back, `waltzctl cluster load-metadata FILE`;
    without one, `waltzctl cluster rebuild-metadata` where all documents are gone, `waltzctl partition rescue` where
    those of one partition are."""


class MetadataBehind(WaltzError, code="W2021", exit_code=EXIT_UNSAFE):
    """A storage has a session above every session in the coordinator: the metadata went back in time. The members of
    that session are unknown, so nothing can be decided safely. Not done: nothing was cut, nothing was written. Next:
    stop the servers and put newer documents back, `waltzctl cluster load-metadata FILE`; without any, `waltzctl
    partition rescue` decides from what the storages hold."""


class BadMetadata(WaltzError, code="W2022"):
    """A document in the coordinator cannot be decoded: it is not JSON, lacks a field, or was written by a newer Waltz.
    Not done: the document was left as it is; what depends on it was not started. Next: look at the document that the
    message names; use the Waltz version that wrote it."""


class MetadataUnfinished(BadMetadata, code="W2045", exit_code=EXIT_CONFLICT, retry=Retry.LATER):
    """A command is restoring the documents of this cluster in the coordinator, or was interrupted. No daemon takes part
    until all documents are there, because a cluster with only some of them would start from nothing. The same command
    run again continues from there. Not done: nothing was started and nothing was changed. Next: wait for the command
    that the message names, or run it again: it completes what it began."""


class LevelUnknown(BadMetadata, code="W2047", exit_code=EXIT_CONFLICT):
    """The cluster has a higher level than this version of Waltz supports: `waltzctl cluster finalize` of a newer version
    ended the time in which this one could come back. Not done: nothing was started, read or written. Next: use the
    version of Waltz that the servers of the cluster run, or a newer one; docs/compatibility.md explains levels."""


class IncompatibleVersion(WaltzError, code="W2053", exit_code=EXIT_CONFLICT, status="FAILED_PRECONDITION"):
    """Two versions of Waltz that do not work together meet: servers, or a server and a storage, that are more than one
    minor version apart; a storage that is older than the level of the cluster; or a client library of another major
    version. Not done: the process that the message names takes no part, and nothing was written. Next: upgrade one minor
    version at a time; docs/compatibility.md has the table, docs/upgrade.md the steps."""


class MetadataFileDamaged(WaltzError, code="W2046", exit_code=EXIT_FINDINGS):
    """A file with the documents of a cluster is not as `waltzctl cluster save-metadata` wrote it: a line is missing or
    changed, the file is cut off, or it is another kind of file. Such a file is never used in part, because a missing or
    wrong document can lose transactions. Not done: nothing was read from it, and nothing was changed. Next: use another
    copy of the file; without one, `waltzctl cluster rebuild-metadata` asks the storages."""


class NameInUse(WaltzError, code="W2023", exit_code=EXIT_CONFLICT):
    """Another running server, storage or cluster has this name, and names must be unique. Not done: nothing was
    changed. Next: choose another name, or stop the process that has it."""


class PolicyUnreadable(WaltzError, code="W2037", retry=Retry.LATER, status="UNAVAILABLE"):
    """The server has not read a valid policy since it started: the document is damaged, or a newer Waltz wrote it. It
    admits operators only. Servers that had read a valid policy keep it. Not done: nothing was read or written. Next: an
    operator looks at it with `waltzctl policy explain`, and writes another one with `waltzctl policy set FILE`."""


class ChangedMeanwhile(WaltzError, code="W2025", exit_code=EXIT_CONFLICT, retry=Retry.LATER):
    """Another command or daemon changed the same metadata between reading and writing. Not done: nothing of this change
    was done. Next: look at the new state and try again."""


class NodeMissing(ChangedMeanwhile, code="W2026", exit_code=EXIT_NOT_FOUND):
    """A document of the coordinator is missing: it was deleted, or the cluster was never created. Not done: nothing of
    this change was done. Next: check the coordinator's address and the root; where a cluster was, restore its newest
    documents."""


class NodeExists(ChangedMeanwhile, code="W2027", exit_code=EXIT_CONFLICT):
    """A document of the coordinator that was to be created exists already. Not done: nothing of this change was done.
    Next: look at what is there; two of the same name cannot be."""


class CoordinatorRefused(WaltzError, code="W2030"):
    """The coordinator answered and refuses for a reason that a retry does not change: it denies permission, or runs
    with settings that Waltz cannot work with. The message quotes it. Not done: nothing was changed. Next: look at the
    coordinator's own log and settings: permissions (ACL) under the cluster's root first."""


class CoordinatorOpen(WaltzError, code="W2039", exit_code=EXIT_UNSAFE):
    """The daemon has certificates, but the documents of its cluster in ZooKeeper are open. Every process that reaches
    ZooKeeper could read and change them, and so decide which storages and servers belong to the cluster. Not done: the
    daemon did not start, and nothing was changed. Next: give all servers one pair of `coordinator_credentials`, with
    `coordinator_open: accepted` meanwhile; then close the documents by `waltzctl cluster set --secure`."""


class TooManyCallers(WaltzError, code="W2050", retry=Retry.LATER, status="RESOURCE_EXHAUSTED"):
    """The server has as many mounts and readers as its configuration permits, or the first message of a call did not
    arrive in time. Existing mounts and readers are not affected. Not done: nothing was read or written. Next: try again
    when others have left; raise mounts_max on the server, or add servers."""


class ClockAhead(WaltzError, code="W2028", status="FAILED_PRECONDITION"):
    """The client passes on the time of a transaction, and that time is far ahead of this server's clock, so the clock
    of one machine is wrong. Times never decrease, so one wrong clock would push the times of all partitions into the
    future. No transaction is wrong by that, because times decide nothing. The client library continues, and passes no
    times to this server until its clock has caught up. Not done: nothing was written. Next: compare the clocks of the
    servers (`waltzctl doctor`) and of the client, and set the wrong one."""


class Disconnected(WaltzError, code="W2052", retry=Retry.LATER, status="UNAVAILABLE"):
    """An operator ended this mount with `waltzctl client disconnect`. The client library mounts again automatically; to
    keep a name out, remove its grants with `waltzctl policy set`. Not done: requests without an answer are undecided
    until the next mount. Next: mount the partition again; the client library does so by itself."""


# -- an application's view ---------------------------------------------------------------------------------------------


class UnfitSegment(WaltzError, code="W2070", status="FAILED_PRECONDITION"):
    """A segment file that was sent to a replica cannot be installed: a record in it fails its checks, it has none, its
    size is not the announced one, or it ends before records that the replica would lose. The message gives the reason;
    the owner takes the records from another replica. Not done: the file was thrown away; the replica is as it was.
    Next: send the segment from another replica, or make it from records that reach far enough."""


# -- clusters ----------------------------------------------------------------------------------------------------------


class NoLocalCluster(WaltzError, code="W2092", exit_code=EXIT_NOT_FOUND):
    """The directory holds no cluster that was created by `waltzctl up`. Not done: nothing was changed. Next: check the
    directory for a typing mistake; `waltzctl up DIRECTORY` makes a cluster there."""


class NotesDamaged(WaltzError, code="W2093", exit_code=EXIT_USAGE):
    """A file of `waltzctl` cannot be decoded: the contexts of this user, or what `waltzctl up` wrote about a cluster on
    this machine. It was edited by hand, or a newer Waltz wrote it. It was left unchanged. Not done: nothing was asked
    of any cluster, nothing was started or stopped. Next: mend the file that the message names, or move it away and
    begin anew."""


class DaemonEnded(WaltzError, code="W2094"):
    """A daemon of a cluster on this machine ended before it was ready. The message has the last lines of its log. At
    the first start of a cluster, or if ZooKeeper ended, everything that was started with it was stopped again, and
    daemons that ran before continue. Later starts leave the other daemons running, so that the cluster can be repaired.
    Not done: the cluster was not brought up; what was started for it is stopped again. Next: read the log that the
    message names; `waltzctl up` again goes on from here."""


class DaemonSilent(WaltzError, code="W2095", exit_code=EXIT_TIMEOUT, retry=Retry.LATER):
    """A daemon of a cluster on this machine runs, but was not ready in time, or did not end in time when it was asked
    to. The message names it and its log. Not done: what it should have done is not known to be done. Next: read the log
    that the message names; on a busy machine, try again."""


class PartitionsClosed(WaltzError, code="W2096", exit_code=EXIT_UNHEALTHY, retry=Retry.LATER):
    """Some partitions were not open in time. The message names them, and what each one waits for. Not done: the
    partitions that the message names take no transactions yet. Next: wait; if it lasts, look at the storages and
    servers that the message names."""


# -- what an operator asked for ----------------------------------------------------------------------------------------


class Unsafe(WaltzError, code="W2100", exit_code=EXIT_UNSAFE):
    """A change was refused because after it, or while it lasts, a partition could not accept transactions or would be
    one failure away from losing some. The message names the partitions and the reasons. Bring replicas back or wait
    until they are level; `--override NAME` with `--reason TEXT` makes the change nevertheless. Not done: nothing was
    changed. Next: repair the cluster first, or override the check with --override NAME and --reason TEXT."""


class NotConfirmed(WaltzError, code="W2101", exit_code=EXIT_USAGE):
    """A change needs a confirmation and got none: the answer was no, or there was no terminal to ask at. Not done:
    nothing was changed. Next: answer the question, or say --yes; look at it with --dry-run first."""


class NoSuchName(WaltzError, code="W2102", exit_code=EXIT_NOT_FOUND):
    """There is no server, storage, context or other object of that name. The message suggests the nearest name if there
    is one. Not done: nothing was changed. Next: check the name."""


class NoClusterNamed(WaltzError, code="W2103", exit_code=EXIT_USAGE):
    """A command does not know its cluster: no option, variable or context names one, and there is no cluster of
    `waltzctl up` in this directory. Not done: nothing was asked of any cluster. Next: say --coordinator HOST:PORT,
    --directory DIR of a cluster of `waltzctl up`, or `waltzctl context use NAME`."""


class Unfinished(WaltzError, code="W2105", exit_code=EXIT_PARTIAL, retry=Retry.LATER):
    """A command did not complete: its time was over, or something stands in the way that the message names. Completed
    steps stay, running steps continue, and every partition has at least the replicas that it had. The same command run
    again continues from there and repeats nothing. Not done: what the message names is not done yet; what was done
    stays. Next: see what it waits for with `waltzctl status`; run the same command again to go on."""


class FormatUnknown(WaltzError, code="W2106", exit_code=EXIT_UNSAFE):
    """A storage cannot write the format of the cluster, because its Waltz is too old, or it does not answer. Its
    replicas would fall behind for ever. Not done: nothing was changed. Next: upgrade the storages that the message
    names, start them again, and run the same command."""


class WouldNotLast(WaltzError, code="W2110", exit_code=EXIT_CONFLICT):
    """A transfer of partitions was refused, because the leader of the servers would undo it at once: it keeps the
    numbers of partitions even, and partitions at their preferred servers as far as that permits. The message gives the
    reason; a draining server takes no partitions at all. A preference that an operator sets takes precedence over those
    of servers. Not done: no partition was moved. Next: say where partitions should be for good: `waltzctl partition
    preferred PARTITIONS --server NAME`."""


class NotTakenOver(WaltzError, code="W2111", exit_code=EXIT_TIMEOUT, retry=Retry.LATER):
    """Partitions were given to other servers, and not all of them were open there in time. The message names them and
    the reasons. Nothing is lost or undone: they open as soon as what they wait for is available. Not done: the
    partitions that the message names are not open at their new owner yet. Next: see why they wait with `waltzctl
    status`, and bring back what is missing."""


class NoServerUp(WaltzError, code="W2132", exit_code=EXIT_UNHEALTHY, retry=Retry.LATER):
    """ZooKeeper lists no server of the cluster, so none is known to own a partition. Either none runs, or
    ZooKeeper has ended the sessions of those that run, and they register again by themselves. Committed transactions are
    on the storages. Not done: nothing was read or written. Next: wait for one ZooKeeper session timeout, or start a server
    of this cluster; `waltzctl status` shows what else is wrong."""


class NotOurExport(WaltzError, code="W2222", exit_code=EXIT_CONFLICT):
    """The output of an export exists, and an export of another kind wrote it: it holds other files, or an export of
    another cluster, format, columns or decoder. Readers of an export rely on its files being alike. Not done: nothing
    was written. Next: name another output, or ask for what this one was made with: `waltzctl export status OUTPUT`
    shows it."""


class ExportHeld(WaltzError, code="W2223", exit_code=EXIT_CONFLICT, retry=Retry.LATER):
    """Another export is writing to the same output, or did until its lease expires. The message names it. Two at the
    same time could write the same records twice. Not done: nothing was written. Next: wait until it is done; what it
    has exported need not be exported again."""


class ExportGap(WaltzError, code="W2225", exit_code=EXIT_CONFLICT):
    """The log begins after the end of the export, or the export was asked to begin after its own end, so ids would be
    missing between. An export never has a gap, because its manifest proves that it is the log. Not done: nothing was
    written. Next: export to a new output, or read the missing ids from a source that still has them."""


class MasterUnreachable(WaltzError, code="W2227", exit_code=EXIT_TIMEOUT, retry=Retry.LATER):
    """The Spark master that was named does not answer, or has no worker to run the tasks. The message says which. Not done:
    nothing was written. Next: check the address, and that the master has workers with free cores; without --master this
    machine is used."""


class SparkFailed(WaltzError, code="W2228"):
    """Spark ended, or could not do what it was asked to. The message has its own words, and names the file with all that it
    wrote. What was finished before is in the manifest and stays. Not done: what was not finished is not in the export.
    Next: read the file that the message names, remove the cause, then run the same command again."""


class PythonDiffers(WaltzError, code="W2229", exit_code=EXIT_USAGE):
    """The machines of a Spark cluster run another Python than the one that plans the export, or theirs lacks a package that
    reading needs: NumPy and PyArrow, and grpcio for a live cluster. Nothing was written. Not done: nothing was written.
    Next: give the workers the same Python with these packages, and name it: --conf spark.pyspark.python=PATH."""


class ExportDamaged(WaltzError, code="W2230", exit_code=EXIT_FINDINGS):
    """A file of an export is missing or is not what its manifest says; or the manifest itself, which is what proves the
    export, cannot be understood, has another checksum, or does not agree with its files. The message names the file, and
    the ids in it. Not done: nothing was changed. Next: bring the file back from a copy (an older manifest may still be
    there), or export to a new output."""


class TableDiffers(WaltzError, code="W2231", exit_code=EXIT_CONFLICT):
    """The Delta table beside an export is not the one that the export has kept: another table was there before, or it
    says that it has more than the export. What others did to a table is never undone or repaired by an export. The files of
    the export and its manifest are what they were. Not done: nothing was written, and the table was not changed. Next: name
    another output; or move _delta_log away, and the next run makes the table anew from the manifest."""


class TableFailed(WaltzError, code="W2232"):
    """The Delta table beside an export could not be read, or the files of a manifest could not be added to it. The message
    has the words of deltalake. The manifest counts nevertheless, and the next run adds to the table what it lacks, once.
    Not done: the table says what it said before; files and manifest of the export are whole. Next: remove the cause, then
    run the same command again: it begins with the table."""


class StoreFailed(WaltzError, code="W2233", retry=Retry.LATER):
    """The object store or HDFS that holds an export failed. The message quotes it: often a missing bucket, missing or
    insufficient credentials, or a wrong end point. Credentials are taken from the environment or the files of the
    store's other tools. Not done: what was being written does not count; the newest manifest is what it was. Next:
    check that the place exists and that you may write there, then run the same command again."""


class StoreUnavailable(WaltzError, code="W2260", exit_code=EXIT_TIMEOUT, retry=Retry.LATER):
    """The store of the archive did not answer in time, or answered with an error of its own. The object may have been
    written nevertheless. Storages retry with growing pauses and delete nothing meanwhile, so the log grows on their
    disks. Not done: it is not known whether the object was written. Next: check that the store is up and can be reached
    from here; storages try again by themselves."""


class StoreRefused(WaltzError, code="W2261", exit_code=EXIT_NOT_AUTHORISED):
    """The store of the archive refused: missing rights, no such bucket or directory, or a store that cannot write under
    a condition. The message quotes it. Storages retry from time to time, so only the cause has to be removed. Not done:
    nothing was written. Next: check the address and the credentials: reading, listing and conditional writing are
    needed."""


class ObjectAbsent(WaltzError, code="W2262", exit_code=EXIT_NOT_FOUND):
    """An object is not in the store of the archive. If the archive's manifest names it, it was deleted from there. Not
    done: nothing was read or written. Next: check that the address names the right store, and which program
    deletes objects in it."""


class ObjectExists(WaltzError, code="W2263", exit_code=EXIT_CONFLICT, retry=Retry.LATER):
    """The store of the archive holds another object under this name than the writer expected: a second writer was
    first. Nothing was overwritten. Archiving reads that object and continues from it. Not done: nothing was written.
    Next: nothing, if another storage did the same work; otherwise find out which other program writes to this store."""


class ArchiveDamaged(WaltzError, code="W2264", exit_code=EXIT_FINDINGS):
    """An object of an archive is not as it was written, or names an object that is missing: bit rot, or another program
    writes to the store. The message names the object, and the ids if they are known. The replicas of the cluster do not
    depend on it. Not done: nothing was written, and nothing of it was used. Next: bring it back with `waltzctl archive
    heal`, or from a copy or an older version of it in the store."""


class UnsignedArchive(ArchiveDamaged, code="W2285", exit_code=EXIT_FINDINGS):
    """A manifest, the label, a tail or saved documents in an archive carry no signature, or one of another key. The
    key of this archive is not in its store: another program wrote the object, or it is older than the key. Not
    done: nothing was written, and nothing of it was used. Next: check which programs may write to the store,
    and that every storage has the same `archive_key`; of an archive that is older than its key, verify it, then
    `waltzctl archive sign`; until then `archive_unsigned: accepted`."""


class ForeignArchive(WaltzError, code="W2265", exit_code=EXIT_CONFLICT):
    """The store that `archive` names holds the archive of another cluster, or is empty although an archive of this cluster
    was begun: another store, or one that was emptied. Archives are never mixed, and one is never begun a second time by
    itself. Nothing was written. Not done: nothing was written. Next: let `archive` of all storages name the store in which
    the archive of this cluster was begun."""


class NoArchive(WaltzError, code="W2266", status="FAILED_PRECONDITION"):
    """The storage has no `archive` in its configuration, so it uploads nothing. The owner of a partition asks another
    of its storages; if none has one, the log is not archived. Not done: nothing was uploaded. Next: set `archive` in
    the configuration of each storage, with the same store, and start them again."""


class CacheFailed(WaltzError, code="W2272", retry=Retry.LATER):
    """A cache file for records of the archive could not be written: the disk is full, or the directory is missing or
    not writable. It is tried again with the next read. Not done: nothing was read from the archive. Next: make room,
    lower `archive_cache_bytes`, or name another directory in `archive_cache`."""


class CutImpossible(WaltzError, code="W2277", exit_code=EXIT_USAGE):
    """A cluster cannot be restored to this moment, or these marks: nothing in the store is as old, the moment is in the
    future, the store does not reach as far, or a partition was left out. The message says which, and how far the store
    reaches. Not done: nothing was changed. Next: look at what the store has: `waltzctl archive status STORE --latest`
    prints the newest moment that is whole."""


class NoTimes(WaltzError, code="W2278", exit_code=EXIT_USAGE):
    """Records of format 0 have no times, so the records of a given moment are unknown. Such a partition can be restored
    to a mark, or to the end of the store. From format 1 on each batch has its time. Not done: nothing was changed.
    Next: give a mark for each partition with --through-marks, or take all of it with --latest --each-as-far-as-it-goes."""


class TargetNotEmpty(WaltzError, code="W2279", exit_code=EXIT_CONFLICT):
    """A cluster is restored into storages that hold nothing and a coordinator that knows nothing, and here is something
    already: replicas with records, replicas that were restored to another end, or documents. Nothing is written over. Not
    done: nothing there was changed. Next: use storages with empty directories; where a restore was interrupted, repeat it
    with the same words."""


class OldClusterLives(WaltzError, code="W2284", exit_code=EXIT_UNSAFE):
    """The cluster whose log is in the store still has storages that answer. Under the same key, its servers and
    applications would take the restored cluster for their own, and two logs would continue under the same ids. Not
    done: nothing was changed. Next: stop the old storages for good, or restore under another key, without --same-key."""


class ExportUnfit(WaltzError, code="W2240", exit_code=EXIT_USAGE):
    """An export was made by an ability that this version does not have: as segments again (`--lossless`), with SQL
    (`--select`, `--where`, `--engine spark`), or as JSON, CSV or ORC. Its files are whole, and every reader of their format
    reads them. Not done: nothing was read or written. Next: read the files with a reader of their format; to go on, export
    to a new output as Parquet or Delta. Segments come back from an archive (`waltzctl cluster restore`); other formats and
    SQL are three lines of Spark (docs/spark.md)."""


class BadDecoder(WaltzError, code="W2243", exit_code=EXIT_USAGE):
    """The decoder that `--decode` names cannot be used: it is not one of the decoders, its file cannot be read or
    understood, or the function does not do what a decoder has to. No payload was looked at. Not done: nothing
    was decoded. Next: there are json:SCHEMA, text, binary and module:function."""


class CertificateNotMade(WaltzError, code="W2035", exit_code=EXIT_USAGE):
    """`waltzctl certificate issue` could not make a certificate: the program `openssl` is missing or refused, or half of
    the authority is not in the directory. What was made before stays as it is. Not done: no certificate was made. Next:
    install openssl 1.1.1 or newer, or let an authority of your own sign: docs/security.md."""


class AlreadyThere(WaltzError, code="W2140", exit_code=EXIT_CONFLICT):
    """The target exists and differs: a file, a directory that is not empty, a context of this name, a cluster of this
    key with another name, size or storages, or one that `waltzctl reset` has half removed. It may be needed, so it was
    left unchanged. Not done: nothing was written. Next: choose another name or place, or move away what is there."""


class TransactionsGone(WaltzError, code="W2210", exit_code=EXIT_FINDINGS):
    """A stream of Spark was to go on at transactions that are not there any more: the log was trimmed before they were
    read, it ends before ids that were read from it once, or a partition is missing. What was read before is not undone.
    With the option `failOnDataLoss=false` the stream passes over what is gone. Not done: no row of this batch was returned,
    and the stream did not advance. Next: find out where they went, an archive may hold them; failOnDataLoss=false goes on
    without them."""


class PositionUnknown(WaltzError, code="W2211", exit_code=EXIT_USAGE):
    """The checkpoint of a stream of Spark holds a position that this version of the data source did not write: another
    version did, another source did, or the file is damaged. Not done: nothing was read. Next: use the version that wrote
    it, or begin with a new checkpoint and startingTxnIds."""


class LogUnreadable(WaltzError, code="W2200", exit_code=EXIT_UNHEALTHY, retry=Retry.LATER):
    """Committed ids of a partition could not be read: neither the replicas that were asked nor the server that owns the
    partition returned them. The message names the ids and each reason. They are not lost by that. Rows before these ids
    were returned; a read of the whole log did not finish. Not done: no row from the first of these ids on was returned.
    Next: look at the storages and servers that the message names with `waltzctl status`, then read again."""


class MarkUnknown(WaltzError, code="W2201", exit_code=EXIT_UNSAFE):
    """A directory holds segments of records, and no control file or hard-state file that says which records are
    committed. Uncommitted records could be among them. In segments that were restored from an export, all records are
    committed. Not done: nothing was read. Next: give the directory of the storage itself; or set allowUncommitted to
    true to read whatever is there."""


# -- the console -------------------------------------------------------------------------------------------------------


class ConsoleExposed(WaltzError, code="W2320", exit_code=EXIT_USAGE):
    """The console was to listen on an address that other machines reach. Anyone with access to the network traffic would
    get its token and see the cluster. Other machines reach the console through a tunnel such as `ssh -L`, or a reverse
    proxy with TLS. Not done: the console did not start. Next: leave --listen out; reach it through `ssh -L`, or put a
    reverse proxy with TLS in front."""


class ConsoleClosed(WaltzError, code="W2321", exit_code=EXIT_NOT_AUTHORISED):
    """The browser did not open the address that the console printed, or the console was restarted since. A token works
    once; after that the console prints another one. Not done: nothing was shown. Next: open the newest address that
    `waltzctl console` has printed."""


# -- the disk ----------------------------------------------------------------------------------------------------------


class ReadFailed(WaltzError, code="W3007", retry=Retry.ELSEWHERE):
    """The operating system could not read bytes of a file (an I/O error of the device). Nothing was changed. Not done:
    nothing was returned. Next: look at the kernel log for this device; rebuild this replica on a sound disk."""


class TooManyFiles(ReadFailed, code="W3011", retry=Retry.ELSEWHERE, status="RESOURCE_EXHAUSTED"):
    """The operating system could not open or read a file, because the process or the machine has too many files open or
    no memory left. It proves nothing about the file. Nothing was changed. Not done: nothing was returned. Next: raise
    `LimitNOFILE` in the unit of the daemon, or `ulimit -n`, and start it again; look for what takes the memory."""


class DiskFull(WaltzError, code="W3005", retry=Retry.LATER, status="RESOURCE_EXHAUSTED"):
    """The file system has no space left, or less than the configured reserve. Writes that were not acknowledged were
    undone. Reads and administration continue, and writes resume automatically when there is space. Not done: nothing
    above the replica's durable id was kept. Next: free space on the file system of the storage directory."""


class FlushFailed(WaltzError, code="W3006", exit_code=EXIT_DISK_FAULT):
    """The operating system failed to flush written bytes to the disk. The content of the disk is unknown then, and a
    second flush could falsely report success, so the storage process ends. What was acknowledged before is on disk. At
    the next start the tail is verified, written again and flushed before this replica vouches for it. Not done: nothing
    was acknowledged since the last durable id that the message names. Next: look at the kernel log for this device;
    start the storage again when the disk is sound."""


class DirectoryHeld(WaltzError, code="W3001", exit_code=EXIT_CONFLICT):
    """Another process holds the storage directory. Two processes must never write the same files. Not done: nothing was
    changed. Next: stop the daemon that holds the directory, or use --read-only where the command has it."""


class ControlDamaged(WaltzError, code="W3002", exit_code=EXIT_FINDINGS):
    """The control file, or the identity file beside it, is missing, too short, or fails its checks. It holds the
    highest sessions of this storage, so it is never recreated over existing data. Not done: the storage directory was
    not opened and nothing was changed. Next: restore the file from a copy of this directory, or rebuild this storage
    from the other replicas."""


class PartitionDamaged(WaltzError, code="W3003", exit_code=EXIT_FINDINGS, retry=Retry.ELSEWHERE, status="DATA_LOSS"):
    """Bytes of this partition are not as they were written: a record fails its checksum and valid records follow, a
    segment is missing or belongs elsewhere, or the log is shorter than the replica has vouched for. The damaged ids are
    refused, nothing is truncated, and the replica does not vote. Other ids and other partitions are served. Not done:
    the damaged ids were not returned, nothing was cut. Next: run `waltzctl verify-segments --read-only` on the
    directory; rebuild this replica from the other replicas."""


class UnknownVersion(WaltzError, code="W3004"):
    """A file has a format version that this program does not know, most likely because a newer Waltz wrote it. Not
    done: the file was not read and not changed. Next: use the Waltz version that wrote the file, or a newer one."""


class DirectoryGone(FlushFailed, code="W3010", exit_code=EXIT_DISK_FAULT):
    """The directory of a running storage, or the files of a partition, disappeared or were replaced: they were deleted,
    or the file system was unmounted. Writes to the open files are lost, so the storage process ends. The message names
    each partition and the highest id that was on disk. Not done: nothing more is acknowledged; what the message names
    is lost here unless the directory comes back. Next: put the directory back, or mount it, and start the storage
    again; on an empty one it starts without data."""


class HeaderDamaged(WaltzError, code="W3009", exit_code=EXIT_FINDINGS):
    """The 128 bytes at the start of a segment or index file are not a header of this partition and position: too short, or
    the file belongs to another partition or starts at another id than its name says. Not done: nothing was read from the
    file. Next: put the right file in its place, or rebuild this replica from the other replicas."""


class WrongStorage(WaltzError, code="W2085", exit_code=EXIT_CONFLICT, retry=Retry.LATER, status="FAILED_PRECONDITION"):
    """A directory, or the storage that answers at an address, belongs to another storage than the one that is meant:
    two directories were swapped, a backup of another storage was put here, or two addresses are mixed up. A directory
    stores the name of its storage, and every call names the storage that it means. `waltzd storage --rename` renames a
    directory on purpose. The error is also given for two names of one replica: an acknowledgement under both names is
    on one disk, so the owner counts it once. Not done: nothing was changed. Next: check which directory is mounted
    there, and the addresses of both storages."""


class WrongPeer(CannotConnect, code="W4004", exit_code=EXIT_CONFLICT, retry=Retry.LATER):
    """Another process or port answers at the address than the one that is meant: two addresses are mixed up, a
    certificate has another name or role, or another storage's directory is mounted there. It counts as no answer of the
    one that was meant. Not done: nothing was asked of it. Next: check the address, and which certificate and directory
    the process there is configured with."""


class PortInUse(WaltzError, code="W4002", exit_code=EXIT_CONFLICT):
    """Another process listens on the address in the configuration of the daemon. Not done: the daemon was not started.
    Next: stop the other process, or change the address in the configuration."""


_TOOLS = ("kazoo", "rich", "typer", "yaml")
BROUGHT = {
    "tools": _TOOLS,
    "daemon": (*_TOOLS, "grpc_health", "grpc_reflection", "prometheus_client", "uvloop"),
    "spark": ("waltz_spark", "pyarrow", "pyspark", "py4j"),
    "metrics": ("prometheus_client",),
    "otel": ("opentelemetry",),
    "console": ("starlette", "uvicorn", "jinja2", "markupsafe"),
}
"""What a program imports, by the extra that brings it."""


def not_installed(error: ModuleNotFoundError, *extras: str) -> NotInstalled:
    """Return the error for an import that failed, if one of these extras brings its package. Raise any other error
    again."""
    package = (error.name or "").partition(".")[0]
    for extra in extras:
        if package in BROUGHT[extra]:
            return NotInstalled(f"the package {package} is not installed", extra=extra)
    raise error


def tree() -> dict[str, type[WaltzError]]:
    """Return all errors by code, in order."""
    found: dict[str, type[WaltzError]] = {}
    queue = list(WaltzError.__subclasses__())
    while queue:
        cls = queue.pop(0)
        assert cls.code not in found, f"{cls.__name__} and {found[cls.code].__name__} share the code {cls.code}"
        found[cls.code] = cls
        queue.extend(cls.__subclasses__())
    return dict(sorted(found.items()))


def page() -> str:
    """Return docs/errors.md: all exit codes, the errors that an application handles, and the rest, in Markdown."""
    exits = "\n".join(f"| {code} | {meaning} |" for code, meaning in EXIT_MEANING.items())
    parts = [
        "# Errors\n\n"
        "This page is made from `waltzd/errors` by `./dev generate`; a test fails when it is stale.\n\n"
        "An error has a code that is the same in every version, and three parts: what failed, what was not done, and the\n"
        "next step. `waltzctl errors lookup CODE` prints an entry of this page.\n\n"
        "## Exit codes\n\n"
        f"| exit code | meaning |\n|---|---|\n{exits}\n\n"
        "## Errors of applications\n\n"
        "The library raises these errors; a program catches one by its class in `waltzd.errors`, or all of them as\n"
        "`WaltzError`. *Retry* says what a program may do with the same request: `never`, `later`, or `elsewhere`, which\n"
        "is at another server or storage.\n"
    ]
    ordered = list(tree().values())
    parts += [_entry(cls) for cls in ordered if cls.__module__ != __name__]
    parts.append(
        "## Errors of daemons and tools\n\n"
        "People read these errors in logs and in the output of commands; no application handles one of them by its class.\n"
        "Their classes are in `waltzd.errors.operations`.\n"
    )
    parts += [_entry(cls) for cls in ordered if cls.__module__ == __name__]
    return "\n".join(parts)


def _entry(cls: type[WaltzError]) -> str:
    text, not_done, next_step = explain(cls)
    return (
        f"### {cls.code} {cls.__name__}\n\n"
        f"{text}\n\n"
        f"- Not done: {not_done}.\n"
        f"- Next: {next_step}.\n"
        f"- Exit code {cls.exit_code}; retry {cls.retry.value}.\n"
    )

"""What a person should be woken for, or told in the morning, as rules for Prometheus. Pure.

A rule is about what users of the log notice, or what is one failure away from that; each says what it means and what to do.
The thresholds are places to begin: whoever knows their disks and their load changes the file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Alert:
    name: str
    expr: str
    lasting: str
    """How long it has to be so."""
    severity: str
    """critical: somebody is needed now; warning: today."""
    summary: str
    description: str


ALERTS = (
    Alert(
        name="WaltzNoServer",
        expr="absent(waltz_server_ready)",
        lasting="2m",
        severity="critical",
        summary="No Waltz server is seen",
        description="No server answers at its http_listen, or Prometheus does not reach it. Look at their processes.",
    ),
    Alert(
        name="WaltzDaemonGone",
        expr="(last_over_time(waltz_server_ready[6h]) or last_over_time(waltz_storage_ready[6h])) "
        "and on (job, instance) (up == 0)",
        lasting="2m",
        severity="warning",
        summary="{{ $labels.instance }} does not answer",
        description="A server or storage that was there within the last hours does not answer. Look at its process and its "
        "log; the others go on as long as a majority of the replicas is there.",
    ),
    Alert(
        name="WaltzPartitionNotOpen",
        expr="waltz_server_partition_open == 0",
        lasting="1m",
        severity="critical",
        summary="Partition {{ $labels.partition }} takes no transactions",
        description="Its owner {{ $labels.instance }} has not opened it. Its /readyz and `waltzctl status` say what it "
        "waits for.",
    ),
    Alert(
        name="WaltzPartitionsMissing",
        expr="sum by (job) (waltz_server_partition_open) < max by (job) (waltz_server_cluster_partitions)",
        lasting="2m",
        severity="critical",
        summary="Only {{ $value }} partitions are open",
        description="Some partitions are owned by nobody, or by a server that is not watched. `waltzctl partition list` "
        "shows them.",
    ),
    Alert(
        name="WaltzPartitionCannotWrite",
        expr="waltz_server_partition_margin < 0",
        lasting="1m",
        severity="critical",
        summary="Partition {{ $labels.partition }} has no majority of replicas",
        description="Fewer members count than a majority, so nothing is committed. Bring storages back: `waltzctl "
        "partition describe {{ $labels.partition }}`.",
    ),
    Alert(
        name="WaltzPartitionNoMargin",
        expr="waltz_server_partition_margin == 0 "
        "and waltz_server_partition_members_counting < waltz_server_partition_members",
        lasting="5m",
        severity="critical",
        summary="Partition {{ $labels.partition }} stops at the next failure",
        description="Just a majority of its members is level: one more storage that fails stops it. Bring the missing ones "
        "back: `waltzctl partition describe {{ $labels.partition }}`.",
    ),
    Alert(
        name="WaltzReplicaMissing",
        expr="waltz_server_partition_members_counting < waltz_server_partition_members",
        lasting="15m",
        severity="warning",
        summary="Partition {{ $labels.partition }} has fewer level replicas than it should",
        description="{{ $value }} members count. Those that are behind catch up by themselves while their storage runs.",
    ),
    Alert(
        name="WaltzReplicaLagGrows",
        expr="waltz_server_replica_lag_transactions > 1000 and deriv(waltz_server_replica_lag_transactions[10m]) > 0 "
        'unless on (job, instance, partition, storage) waltz_server_replica_state{state=~"DOWN|CONNECTING"}',
        lasting="15m",
        severity="warning",
        summary="Storage {{ $labels.storage }} falls behind in partition {{ $labels.partition }}",
        description="It lacks {{ $value }} committed transactions, and more from minute to minute. Its disk or its network "
        "is too slow, or catch_up_bytes_per_second of the servers is too small.",
    ),
    Alert(
        name="WaltzReplicaDamaged",
        expr="waltz_storage_replica_damaged == 1 or waltz_storage_replica_refused == 1",
        lasting="5m",
        severity="critical",
        summary="{{ $labels.instance }}: the replica of partition {{ $labels.partition }} is damaged",
        description="Its owner has not healed it. `waltzctl storage describe` says what is wrong; `waltzctl storage "
        "recover` brings it back from the others.",
    ),
    Alert(
        name="WaltzStorageDiskFull",
        expr="waltz_storage_free_bytes < waltz_storage_free_bytes_min or on (job, instance) "
        "max by (job, instance) (waltz_storage_replica_full) == 1",
        lasting="1m",
        severity="critical",
        summary="{{ $labels.instance }}: the disk is full",
        description="It refuses appends until there is more free space than free_bytes_min. Make room; do not remove files "
        "of Waltz.",
    ),
    Alert(
        name="WaltzStorageDiskNearlyFull",
        expr="waltz_storage_free_bytes / on (job, instance) (waltz_storage_free_bytes "
        "+ on (job, instance) sum by (job, instance) (waltz_storage_replica_disk_bytes)) < 0.1 "
        "or predict_linear(waltz_storage_free_bytes[1h], 6 * 3600) < waltz_storage_free_bytes_min",
        lasting="10m",
        severity="warning",
        summary="{{ $labels.instance }}: the disk is nearly full",
        description="Less than a tenth of what it can use is free, or it will be full within six hours at the present "
        "rate. Add space, or another storage.",
    ),
    Alert(
        name="WaltzFlushSlow",
        expr="histogram_quantile(0.99, sum by (job, instance, le) (rate(waltz_storage_flush_seconds_bucket[5m]))) > 0.5",
        lasting="10m",
        severity="warning",
        summary="{{ $labels.instance }}: one flush in a hundred takes {{ $value | humanizeDuration }}",
        description="Its disk is slow or has something else to do. A majority of faster storages hides it from "
        "applications.",
    ),
    Alert(
        name="WaltzCommitSlow",
        expr="histogram_quantile(0.99, sum by (job, instance, le) (rate(waltz_server_commit_seconds_bucket[5m]))) > 1",
        lasting="10m",
        severity="warning",
        summary="{{ $labels.instance }}: one transaction in a hundred takes {{ $value | humanizeDuration }}",
        description="From its arrival at the server to its outcome. Look at the storages' flushes, the network between "
        "them, and the processors of the server.",
    ),
    Alert(
        name="WaltzServerDegraded",
        expr="waltz_server_coordinator_connected == 0",
        lasting="1m",
        severity="critical",
        summary="{{ $labels.instance }} does not hear ZooKeeper",
        description="It goes on with the partitions that it has and can take over no other. Look at ZooKeeper.",
    ),
    Alert(
        name="WaltzNoLeader",
        expr="max by (job) (waltz_server_leader) == 0",
        lasting="2m",
        severity="warning",
        summary="No server decides who owns what",
        description="Partitions of a server that fails now stay without an owner. Look at ZooKeeper and at the logs.",
    ),
    Alert(
        name="WaltzNotReady",
        expr="waltz_server_ready == 0 or waltz_storage_ready == 0",
        lasting="10m",
        severity="warning",
        summary="{{ $labels.instance }} is not ready",
        description="Its /readyz says why.",
    ),
    Alert(
        name="WaltzCertificateOver",
        expr="waltz_server_certificate_seconds < 0 or waltz_storage_certificate_seconds < 0",
        lasting="1m",
        severity="critical",
        summary="{{ $labels.instance }}: its certificate is over",
        description="Connections that are open go on, and nobody new gets in; a restart makes it worse. Put another "
        "certificate in its place: the daemon takes it up by itself.",
    ),
    Alert(
        name="WaltzCertificateEndsSoon",
        expr="waltz_server_certificate_seconds < 7 * 86400 or waltz_storage_certificate_seconds < 7 * 86400",
        lasting="60m",
        severity="warning",
        summary="{{ $labels.instance }}: its certificate ends in {{ $value | humanizeDuration }}",
        description="Put another one in its place before that: the daemon takes it up by itself, without a restart.",
    ),
    Alert(
        name="WaltzManyRefusals",
        expr="sum by (job, partition) (rate(waltz_server_refused_transactions_total[10m])) "
        "/ (sum by (job, partition) (rate(waltz_server_attempted_transactions_total[10m])) > 1) > 0.2",
        lasting="15m",
        severity="warning",
        summary="Partition {{ $labels.partition }}: {{ $value | humanizePercentage }} of the transactions are refused",
        description="Applications lock the same things too often, or lag behind (reason FLOOR). `waltzctl lock explain` "
        "says who holds a lock.",
    ),
    Alert(
        name="WaltzOpenFilesNearlyUsedUp",
        expr="process_open_fds / process_max_fds > 0.8 and on (job, instance) (waltz_server_ready or waltz_storage_ready)",
        lasting="10m",
        severity="warning",
        summary="{{ $labels.instance }} may open few files more",
        description="Raise the limit of open files (LimitNOFILE of the unit), or find out who connects so often.",
    ),
)


def document() -> dict[str, Any]:
    """As Prometheus reads it."""
    rules = [
        {
            "alert": alert.name,
            "expr": alert.expr,
            "for": alert.lasting,
            "labels": {"severity": alert.severity},
            "annotations": {"summary": alert.summary, "description": alert.description},
        }
        for alert in ALERTS
    ]
    return {"groups": [{"name": "waltz", "rules": rules}]}

"""Commands and options that were removed, with the replacement of each.

A removed name is not reported as unknown: the error names the replacement, for people and scripts that still use it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from waltzd.errors import BadArgument

_COPY = "start the storage on an empty directory, and `waltzctl storage recover STORAGE`: its owners copy"
_WRITE_BY_SPARK = 'write it with Spark: `spark.read.format("waltz")…write`, as docs/spark.md shows'
_SUBMIT = "run the driver here, or submit a program of your own with spark-submit, as docs/spark.md shows"
_ENVIRONMENT = "install the packages on the workers, or hand an environment to Spark: --conf spark.archives=FILE#NAME"
_PROXY = "leave it out; put a reverse proxy with TLS or `ssh -L` in front (docs/console.md)"
_KIND, _KINDS = "use `--kind N`", "use `--kinds N,...`"
_AFTER, _THROUGH, _BEFORE = "use `--after ID` with the id before it", "use `--through ID`", "use `--before TIME`"
REMOVED: dict[str, str] = {
    "analysis": "use Spark SQL over the log or an export; docs/spark.md has the queries",
    "archive clean": "use `waltzctl archive heal STORE --clean`",
    "archive marks": "use `waltzctl archive status STORE`",
    "archive new-key": "use `waltzctl archive sign --new-key FILE`",
    "archive restore": "restore segments from the archive of the cluster: `waltzctl cluster restore`",
    "archive status --to-marks": "use `--through-marks FILE`",
    "archive status --to-time": "use `--through TIME`",
    "archive timelines": "use `waltzctl archive status STORE --timelines`",
    "audit": "read `audit.log` of the daemon with jq; docs/security.md shows how, and how to check its chain",
    "backup drill --to-marks": "use `--through-marks FILE`",
    "backup drill --to-time": "use `--through TIME`",
    "backup status": "use `waltzctl archive status --lost-now`, with a STORE behind `status` to ask the store only",
    "bench append --chart": "draw the JSON of `-o json`",
    "bench append --mode": "leave it out; locks are of the mode WRITE",
    "bench append --spread": "leave it out, or make a cluster with fewer --partitions",
    "bench feed --chart": "draw the JSON of `-o json`",
    "bench feed --mode": "leave it out; locks are of the mode WRITE",
    "bench feed --spread": "leave it out, or make a cluster with fewer --partitions",
    "bench locks": "use `waltzctl bench append` with few --keys, and read how many were refused",
    "bench mixed": "use `waltzctl bench append`, and `waltzctl bench feed` for readers; "
    "in a checkout `./dev bench curves --curves readers`",
    "bench recovery": "stop an owner while `waltzctl bench append` runs, and read its highest latency",
    "channel create": "use `waltzctl channel set NAME PARTITIONS`",
    "channel remove": "use `waltzctl channel set NAME --none`",
    "client describe": "use `waltzctl client list NAME`",
    "cluster describe": "use `waltzctl status`, and `waltzctl partition list` for each partition",
    "cluster restore --to-marks": "use `--through-marks FILE`",
    "cluster restore --to-time": "use `--through TIME`",
    "cluster secure": "use `waltzctl cluster set --secure`",
    "cluster status": "use `waltzctl status`",
    "config explain": "read docs/configuration.md; `waltzd storage --check-config` shows every value in force",
    "console --allow-changes": "leave it out; each page shows the commands that change something",
    "console --host": "leave it out; a reverse proxy passes the console's own host and port",
    "console --https-ca": _PROXY,
    "console --https-certificate": _PROXY,
    "console --https-key": _PROXY,
    "context remove": "use `waltzctl context use NAME --remove`",
    "context show": "use `waltzctl context use` without a name",
    "context validate": "use `waltzctl status --context NAME`",
    "errors list": "use `waltzctl errors lookup` without a code",
    "events --follow": "use `waltzctl events --since 1m` again, or follow the log of a daemon on its machine",
    "group create --from-id": _AFTER,
    "group create --from-last": "use `--start last`",
    "group create --from-time": "use `--start TIME`",
    "group create --headers": _KINDS,
    "group create --key header": "use `--key kind`",
    "group lag": "use `waltzctl group list`, and `waltzctl group describe NAME` for each partition",
    "group parked discard": "use `waltzctl group parked replay --discard`",
    "group pass-over": "use `waltzctl group resume --pass-over ENTRY`",
    "group reset --skip-to": "use `--skip-through ID`",
    "group reset --to-first": "use `--start first`",
    "group reset --to-id": _AFTER,
    "group reset --to-last": "use `--start last`",
    "group reset --to-time": "use `--start TIME`",
    "group set --headers": _KINDS,
    "group skip": "use `waltzctl group reset NAME --partitions PARTITION --skip-through ID`",
    "help": "use `waltzctl errors lookup`, which lists the exit codes, too",
    "lock explain --search": "leave it out; the key indexes of the log are asked, however far back",
    "moves": "use `waltzctl partition assign`: it goes on with moves, and --cancel takes them back; `status` lists them",
    "partition unassign": "use `waltzctl partition assign PARTITIONS --off STORAGE`",
    "policy remove": "use `waltzctl policy set --none`",
    "policy show": "use `waltzctl policy explain` without a name",
    "policy test": "use `waltzctl policy set FILE --check`",
    "segment dump --from": _AFTER,
    "segment dump --to": _THROUGH,
    "server undrain": "use `waltzctl server drain SERVER --undo`",
    "spark": "leave it out; `waltzctl spark-export --dry-run` says which Java an export would run on",
    "spark-export --archives": _ENVIRONMENT,
    "spark-export --deploy-mode": _SUBMIT,
    "spark-export --engine": _WRITE_BY_SPARK,
    "spark-export --format csv": _WRITE_BY_SPARK,
    "spark-export --format json": _WRITE_BY_SPARK,
    "spark-export --format orc": _WRITE_BY_SPARK,
    "spark-export --from-txn": _AFTER,
    "spark-export --lossless": "leave it out; an archive keeps segments as they are, for `waltzctl cluster restore`",
    "spark-export --select": _WRITE_BY_SPARK,
    "spark-export --spark-submit": _SUBMIT,
    "spark-export --to-txn": _THROUGH,
    "spark-export --until": _BEFORE,
    "spark-export --where": _WRITE_BY_SPARK,
    "storage clean": "use `waltzctl storage recover STORAGE --clean`",
    "storage create-partition": "use `waltzctl partition assign PARTITIONS --to STORAGE`",
    "storage may-stop": "use `waltzctl cluster wait --without STORAGE`; with `--timeout 0` it checks once",
    "storage partitions": "use `waltzctl storage describe STORAGE`",
    "storage recover --from": _COPY,
    "storage recover --partitions": "name the partitions behind the storage: `waltzctl storage recover STORAGE PARTITIONS`",
    "storage recover --to": _COPY,
    "storage remove-partition": "use `waltzctl partition assign PARTITIONS --off STORAGE`; for forgotten replicas "
    "`waltzctl storage recover STORAGE --clean`",
    "storage replace": "use `waltzctl storage remove OLD --replacement NEW`",
    "txn append --group": "use `--atomic`",
    "txn append --header": _KIND,
    "txn get --until": _BEFORE,
    "txn grep --from": _AFTER,
    "txn grep --header": _KIND,
    "txn grep --to": _THROUGH,
    "txn grep --until": _BEFORE,
    "txn history --before": "use `--through ID`, which includes the id",
    "txn tail --until": _BEFORE,
}
"""Removed name → the replacement, as the text that follows "Next: " in the error.

A name is a group (`analysis`), a command (`cluster status`), an option of a command (`spark-export --lossless`), or one
value of an option (`spark-export --format json`). The entry of a group covers all its commands."""


def check_command(name: str) -> None:
    """Raise `BadArgument` if a command or a group of this name was removed."""
    if name in REMOVED:
        raise BadArgument(f"`waltzctl {name}` was removed", next_step=REMOVED[name])


def check_options(command: str, arguments: Sequence[str]) -> None:
    """Raise `BadArgument` if the arguments of a command name a removed option, or a removed value of an option.

    Call it only with arguments that the command refused: the value of a valid option may look like a removed one.
    """
    for option in _options(arguments):
        if f"{command} {option}" in REMOVED:
            raise BadArgument(f"{option} of `waltzctl {command}` was removed", next_step=REMOVED[f"{command} {option}"])


def _options(arguments: Sequence[str]) -> Iterator[str]:
    """Yield each option alone, then with its value: `--format`, `--format json`."""
    for word, following in pairwise([*arguments, ""]):
        option, has_value, value = word.partition("=")
        if option.startswith("-"):
            yield option
            yield f"{option} {value if has_value else following}"

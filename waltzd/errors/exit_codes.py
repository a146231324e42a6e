"""Exit codes of commands and daemons, and what each of them means."""

from __future__ import annotations

EXIT_OK = 0
EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_NOT_FOUND = 3
EXIT_CONFLICT = 4
EXIT_UNSAFE = 5
EXIT_TIMEOUT = 6
EXIT_PARTIAL = 7
EXIT_FINDINGS = 8
EXIT_NOT_AUTHORISED = 9
EXIT_UNHEALTHY = 10
EXIT_BUG = 70
"""Exit code of a daemon that ended because of an internal error."""
EXIT_DISK_FAULT = 74
"""Exit code of a daemon that ended because a failed flush or write left the content of the disk unknown."""

EXIT_MEANING = {
    EXIT_OK: "done, nothing wrong",
    EXIT_ERROR: "could not run, or failed",
    EXIT_USAGE: "the command line, a path or the configuration is wrong",
    EXIT_NOT_FOUND: "a named thing does not exist",
    EXIT_CONFLICT: "something else holds it, or it changed meanwhile",
    EXIT_UNSAFE: "refused because it could lose data",
    EXIT_TIMEOUT: "no answer in time; the outcome is unknown",
    EXIT_PARTIAL: "done in part; what remains is printed",
    EXIT_FINDINGS: "verification found something wrong",
    EXIT_NOT_AUTHORISED: "not permitted",
    EXIT_UNHEALTHY: "the cluster is unhealthy",
    EXIT_BUG: "a daemon met a mistake in Waltz itself",
    EXIT_DISK_FAULT: "a daemon ended after a failed flush or write",
}

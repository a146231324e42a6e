"""What makes `spark.read.format("waltz")` work without a word before it.

Spark looks for modules whose names begin with `pyspark_`, and registers the `DefaultSource` of each, when a session first
meets a format that it does not know. It imports all of them in one go, and gives up on every one when one cannot be
imported. So where PyArrow or the rest of `waltz[spark]` is not installed, nothing is offered, and nobody else is disturbed.
"""

from __future__ import annotations

try:
    from waltz_spark.source import WaltzDataSource as DefaultSource
except ImportError:
    __all__: list[str] = []
else:
    __all__ = ["DefaultSource"]

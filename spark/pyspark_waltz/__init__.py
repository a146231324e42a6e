"""What makes `spark.read.format("waltz")` work without a word before it.

Spark looks for modules whose names begin with `pyspark_`, and registers the `DefaultSource` of each, when a session first
meets a format that it does not know. It imports all of them in one go, and gives up on every one when one cannot be
imported. So without PyArrow or the rest of `waltzd[spark]` this one offers nothing, and other data sources work.
"""

from __future__ import annotations

try:
    from waltz_spark.source import WaltzDataSource as DefaultSource
except ImportError:
    __all__: list[str] = []
else:
    __all__ = ["DefaultSource"]

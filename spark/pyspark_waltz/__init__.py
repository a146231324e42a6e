"""The registration of `spark.read.format("waltz")`, without any code of the user.

When a session first gets an unknown format, Spark imports all modules whose names begin with `pyspark_`, and registers the
`DefaultSource` of each. If one of them cannot be imported, it registers none. So without the packages of `waltzd[spark]`,
this module defines nothing, and other data sources still work.
"""

from __future__ import annotations

try:
    from waltz_spark.source import WaltzDataSource as DefaultSource
except ImportError:
    __all__: list[str] = []
else:
    __all__ = ["DefaultSource"]

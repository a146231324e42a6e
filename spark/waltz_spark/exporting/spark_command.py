"""`waltzctl spark …`: what can be done for Spark before it is needed."""

from __future__ import annotations

import os
from typing import Annotated

import typer
from typer import Option

from waltz_spark.engine.spark_choice import JavaHome
from waltzctl.shell.interruption import EXIT_INTERRUPTED, ending_in_order
from waltzctl.shell.options import Output
from waltzctl.shell.progress import Shown, ShownProgress, Waiting
from waltzctl.show.forms import AnyForm
from waltzd.errors import EXIT_OK


def warmup(
    *,
    remove: Annotated[bool, Option("--remove", help="Remove all archives that were made, for all Javas.")] = False,
    java_home: JavaHome = None,
    shown: Output = "table",
    progress: ShownProgress = Shown.AUTO,
) -> int:
    """Make exports start faster: Java writes Spark's classes, as it has them in memory, to a file that later starts use.

    This runs three small exports and leaves about 160 MB in the cache directory (~/.cache/waltz/spark/classes). The file is
    of one Java and one Spark: after an update of either it is not used any more, which harms nothing; run this again then.

    \b
    Examples:
      waltzctl spark warmup
      waltzctl spark warmup --remove
    """
    from waltz_spark.engine import render_spark
    from waltz_spark.engine.java import find_java, place_of, remove_all

    if remove:
        render_spark.removed(remove_all(os.environ), shown)
        return EXIT_OK
    place = place_of(find_java(java_home), os.environ)
    from waltz_spark.exporting.rehearsal import build

    try:
        with ending_in_order(), Waiting(progress) as waiting:
            note = build(place, waiting.say)
    except KeyboardInterrupt:
        typer.echo("Interrupted. No archive was made; one that was there is as it was.", err=True)
        return EXIT_INTERRUPTED
    render_spark.warmed_up(place, note, shown)
    return EXIT_OK


def status(*, java_home: JavaHome = None, shown: AnyForm = "table") -> int:
    """Show what an export on this machine would run on: which Java, which Spark, and whether an archive of their classes
    makes it start faster. Starts no Spark.

    \b
    Examples:
      waltzctl spark status
      waltzctl spark status -o json
    """
    from waltz_spark.engine.java import find_java, place_of
    from waltz_spark.engine.render_spark import found

    found(place_of(find_java(java_home), os.environ), shown)
    return EXIT_OK

"""`waltzctl context`: names for clusters, in a file of the user. No cluster is contacted.

A name must be removed before it can be given to another cluster, so that it never changes its cluster by accident.
"""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from waltzctl.shell.blueprint import load_blueprint
from waltzctl.shell.cluster_target import (
    LOCAL_ROOT,
    ClusterOptions,
    ClusterTarget,
    Context,
    Contexts,
    access_to,
    check_context,
    contexts_path,
    known_contexts,
    load_contexts,
    save_contexts,
    shown_files,
    tls_of,
)
from waltzctl.shell.options import Misused, Output
from waltzctl.show.forms import AnyForm, Column, Columns, Listing, put, put_json
from waltzd.errors import EXIT_OK, BadArgument
from waltzd.errors.operations import AlreadyThere


def add(
    *,
    name: Annotated[str, Argument(metavar="NAME")],
    context: Context,
    is_used: Annotated[bool, Option("--use", help="Select this cluster for the next commands.")] = False,
    output: Output = "table",
) -> int:
    """Name a cluster, so that `--context NAME` selects it. The cluster is not contacted. Paths of files are stored as
    absolute paths.

    \b
    Examples:
      waltzctl context add payments --coordinator zk1:2181,zk2:2181 --root /waltz/payments --protected
      waltzctl context add trial --coordinator 127.0.0.1:2181 --use
    """
    paths = ("directory", "tls_certificate", "tls_key", "tls_ca", "coordinator_tls_certificate", "coordinator_tls_key",
             "coordinator_tls_ca", "coordinator_credentials")  # fmt: skip
    absolute = {one: os.path.abspath(path) for one in paths if (path := getattr(context, one)) is not None}
    context = replace(context, **absolute)
    check_context(context, "", BadArgument)
    _check_values(context)
    contexts = load_contexts()
    before = contexts.named.get(name)
    if before is not None and before != context:
        raise AlreadyThere(
            f"the context {name} exists already: {where(before)}",
            not_done="the context was not changed",
            next_step=f"choose another name, or delete the old one with `waltzctl context use {name} --remove`",
        )
    is_current = is_used or contexts.current == name
    save_contexts(Contexts(current=name if is_used else contexts.current, named={**contexts.named, name: context}))
    _print_context(name, is_current, f"{name} is {where(context)}{', and selected' if is_current else ''}.", output)
    return EXIT_OK


def _print_context(name: str, is_current: bool, sentence: str, output: str) -> None:
    """Print the result of a change of the file."""
    if output == "json":
        put_json({"context": name, "is_current": is_current, "file": str(contexts_path())})
    else:
        typer.echo(sentence)


def _check_values(context: Context) -> None:
    """Raise for mistakes that show without contacting the cluster."""
    if context.directory is not None:
        load_blueprint(Path(context.directory))
        return
    from waltzd.cluster.zookeeper import ZooKeeperCoordinator

    assert context.coordinator is not None
    ZooKeeperCoordinator(context.coordinator, context.root or LOCAL_ROOT)
    tls_of(context.tls_certificate, context.tls_key, context.tls_ca)
    own = context.coordinator_tls_certificate, context.coordinator_tls_key, context.coordinator_tls_ca
    files = shown_files(own, (context.tls_certificate, context.tls_key, context.tls_ca))
    access_to(files, how=context.coordinator_tls, credentials=context.coordinator_credentials)


def where(context: Context) -> str:
    if context.directory is not None:
        return f"the cluster in {context.directory}"
    return f"{context.coordinator}{context.root or LOCAL_ROOT}"


def use(
    *,
    name: Annotated[str | None, Argument(metavar="[NAME]", autocompletion=known_contexts)] = None,
    is_removed: Annotated[bool, Option("--remove", help="Delete the name; the cluster is not touched.")] = False,
    given: ClusterOptions,
    output: AnyForm = "table",
) -> int:
    """Select a cluster for all commands that are given no other one by an option or a variable. Without NAME show which
    cluster is selected here, and the source of each setting: an option, else a variable, else the context, else the cluster
    that `waltzctl up` made in this directory. The cluster is not contacted.

    \b
    Examples:
      waltzctl context use payments
      waltzctl context use trial
      waltzctl context use
      waltzctl context use --coordinator 127.0.0.1:2181 --root /waltz/payments -o json
      waltzctl context use trial --remove
    """
    if name is None:
        if is_removed:
            raise Misused("Name the context to delete.")
        return _show(given.target(), output)
    if is_removed:
        return _remove(name, output)
    contexts = load_contexts()
    context = contexts.get(name)
    save_contexts(replace(contexts, current=name))
    _print_context(name, True, f"{name} is selected: {where(context)}{', protected' if context.protected else ''}.", output)
    return EXIT_OK


def list_(*, output: AnyForm = "table") -> int:
    """List the named clusters, and which one is selected.

    \b
    Examples:
      waltzctl context list
      waltzctl context list -o name
    """
    contexts = load_contexts()
    rows = [
        {"name": name, "current": name == contexts.current, "cluster": where(context), "protected": context.protected,
         "certificate": context.tls_certificate, **{key: value for key, value in asdict(context).items()
                                                    if key != "protected"}}
        for name, context in sorted(contexts.named.items())
    ]  # fmt: skip
    columns: Columns[Any] = (
        Column("name"),
        Column("current"),
        Column("cluster"),
        Column("protected"),
        Column("certificate", is_wide=True),
    )
    nothing = "No cluster has a name: waltzctl context add NAME --coordinator HOST:PORT"
    more = {"file": str(contexts_path()), "current": contexts.current}
    put(Listing(kind="contexts", columns=columns, rows=rows, nothing=nothing, more=more), output)
    return EXIT_OK


def _remove(name: str, output: str) -> int:
    contexts = load_contexts()
    contexts.get(name)
    left = {other: context for other, context in contexts.named.items() if other != name}
    was_current = contexts.current == name
    save_contexts(Contexts(current=None if was_current else contexts.current, named=left))
    sentence = f"{name} is deleted; the cluster is unchanged.{' No cluster is selected now.' if was_current else ''}"
    _print_context(name, False, sentence, output)
    return EXIT_OK


def _show(target: ClusterTarget, output: str) -> int:
    rows = [{"setting": name, "value": value, "said_by": origin} for name, (value, origin) in target.origins.items()]
    columns: Columns[Any] = (Column("setting"), Column("value"), Column("said by"))
    more = {"cluster": target.name, "where": target.where, "is_protected": target.is_protected}
    put(Listing(kind="settings", columns=columns, rows=rows, more=more), output)
    return EXIT_OK

"""A cluster that is deleted: what is deleted is what was saved."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.unit.snapshots import KEY, silent, storage, well
from tests.unit.typed_command import typed_command
from waltzctl.placement import cluster as command
from waltzctl.shell.blueprint import write_new
from waltzctl.shell.progress import unreported
from waltzd.cluster.cluster import POLICY, SERVERS, Cluster
from waltzd.cluster.coordinator import Create
from waltzd.cluster.documents import ClusterMeta, PolicyDocument
from waltzd.cluster.memory import MemoryTree
from waltzd.cluster.metadata import read
from waltzd.errors import CannotConnect
from waltzd.errors.operations import ChangedMeanwhile
from waltzd.protocol.document import encode

META = ClusterMeta(name="trial", key=KEY, partitions=4, created="2026-01-01")


@pytest.mark.parametrize("path", ["", POLICY, f"{SERVERS}/a"])
def test_what_another_command_wrote_after_the_documents_were_saved_is_not_deleted(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed, tree, file = typed_command(where="zk:1/of-a-test"), MemoryTree(), tmp_path / "saved"

    def write(path_: Path, data: bytes, **more: Any) -> None:
        write_new(path_, data, **more)
        if path:
            tree.commit([Create(path, encode(PolicyDocument(grants=())))], tree.new_holder())

    async def seen(*_: object, **__: object) -> Any:
        return well(servers=(), storages=(silent(storage("s1"), CannotConnect("refused")),))

    monkeypatch.setattr(command, "write_new", write)
    monkeypatch.setattr(command, "take_snapshot", seen)
    command.delete(file=file, command=typed)

    async def work() -> None:
        cluster = await Cluster.create(tree.connect(), META)
        change = await typed.prepare(cluster)
        if not path:
            await change.do(cluster, unreported)
            assert tree.find("/") is None
            return
        with pytest.raises(ChangedMeanwhile) as refused:
            await change.do(cluster, unreported)
        assert refused.value.detail_not_done == "nothing was deleted"
        assert (await cluster.meta(), tree.find(path) is None) == (META, False)

    asyncio.run(work())
    assert read(file.read_bytes(), "saved").meta == META

"""etcd: three members; a transaction compares the revision of its key and puts a new value there.

The messages are etcd's own over gRPC, the same library that Waltz uses. No client for
Python is used: none for asyncio is well kept.
"""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from tests.bench.peers.process import HOST, Process
from tests.bench.peers.system import Facts, NotCommittedError, System, find_program, missing_of, until_it_works

MEMBERS = 3
CALL_SECONDS = 30.0
QUOTA_BYTES = 8 << 30
PROTO = "tests/bench/peers/etcd.proto"


class Etcd(System):
    name = "etcd"
    package = "apt-get install etcd-server"

    @classmethod
    def missing(cls) -> str | None:
        return missing_of(["etcd"], ["grpc_tools"])

    def start(self) -> None:
        self._clients = [next(self.ports) for _ in range(MEMBERS)]
        peers = [next(self.ports) for _ in range(MEMBERS)]
        cluster = ",".join(f"member-{number}=http://{HOST}:{port}" for number, port in enumerate(peers))
        for number, (port, peer) in enumerate(zip(self._clients, peers, strict=True)):
            settings = {
                "name": f"member-{number}",
                "data-dir": self.home / f"data-{number}",
                "listen-client-urls": f"http://{HOST}:{port}",
                "advertise-client-urls": f"http://{HOST}:{port}",
                "listen-peer-urls": f"http://{HOST}:{peer}",
                "initial-advertise-peer-urls": f"http://{HOST}:{peer}",
                "initial-cluster": cluster,
                "quota-backend-bytes": QUOTA_BYTES,
                "log-level": "error",
            }
            command = [self._program, *(f"--{name}={value}" for name, value in settings.items())]
            self.run(Process(f"member-{number}", command, self.home, port=port))
        for process in self.processes:
            process.wait_listening()

    @property
    def _program(self) -> Path:
        program = find_program("etcd")
        assert program is not None
        return program

    @property
    def address(self) -> tuple[str, ...]:
        return tuple(f"{HOST}:{port}" for port in self._clients)

    @property
    def facts(self) -> Facts:
        said = subprocess.run([self._program, "--version"], capture_output=True, text=True, check=True).stdout
        return Facts(
            version=said.splitlines()[0].split()[-1],
            durability="flushed to the disks of two of three members before it is acknowledged",
            caveat="a store of keys, not a log: each transaction writes a new revision of its key",
        )


class EtcdSession:
    def __init__(self, address: tuple[str, ...]) -> None:
        self._address = address
        self._revisions: dict[int, int] = {}
        """For each slot the revision of its key; 0 when there is none."""
        self._channel: grpc.aio.Channel | None = None

    async def open(self) -> None:
        self._proto = messages()
        leader = await until_it_works("a leader of etcd", self._leader, grpc.aio.AioRpcError, LookupError)
        self._channel = grpc.aio.insecure_channel(leader)
        self._txn = self._call(self._channel, "KV/Txn", "TxnRequest", "TxnResponse")
        self._range = self._call(self._channel, "KV/Range", "RangeRequest", "RangeResponse")

    async def _leader(self) -> str:
        """Talking to it saves a hop."""
        for address in self._address:
            async with grpc.aio.insecure_channel(address) as channel:
                ask = self._call(channel, "Maintenance/Status", "StatusRequest", "StatusResponse")
                status = await ask(self._proto.StatusRequest(), timeout=CALL_SECONDS)
            if status.leader == status.header.member_id:
                return address
        raise LookupError("no member leads")

    def _call(self, channel: grpc.aio.Channel, method: str, asked: str, answered: str) -> Any:
        return channel.unary_unary(
            f"/etcdserverpb.{method}",
            request_serializer=getattr(self._proto, asked).SerializeToString,
            response_deserializer=getattr(self._proto, answered).FromString,
        )

    async def append(self, slot: int, payload: bytes) -> None:
        proto, key = self._proto, b"slot-%d" % slot
        check = proto.Compare(target=proto.Compare.MOD, key=key, mod_revision=self._revisions.get(slot, 0))
        put = proto.RequestOp(request_put=proto.PutRequest(key=key, value=payload))
        answer = await self._txn(proto.TxnRequest(compare=[check], success=[put]), timeout=CALL_SECONDS)
        if not answer.succeeded:
            raise NotCommittedError(f"slot {slot}: somebody else has changed it")
        self._revisions[slot] = answer.header.revision

    async def append_all(self, lane: int, slots: range, payload: bytes) -> None:
        await asyncio.gather(*[self.append(slot, payload) for slot in slots])

    async def kept(self) -> int:
        """Each key counts how often it was put."""
        request = self._proto.RangeRequest(key=b"slot-", range_end=b"slot.", keys_only=True)
        return sum(pair.version for pair in (await self._range(request, timeout=CALL_SECONDS)).kvs)

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()


def messages() -> Any:
    """The classes of the messages, made at run time: the path is looked up from where the process was started."""
    return grpc.protos(PROTO)

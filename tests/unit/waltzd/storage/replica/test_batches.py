"""One replica of format 1, against a list of batches."""

from __future__ import annotations

import random

import pytest

from tests.simulation.batch_log import BatchLog
from tests.simulation.sample import KEY, ROOT, open_directory, run_for
from tests.unit.keeping import begun
from waltzd.disk.simulated import Loss
from waltzd.format.batch import Batch

HOME = f"{ROOT}/0"


class Story:
    """A replica and its model, through appends, cuts, restarts and power cuts."""

    def __init__(self, seed: int) -> None:
        pick = self.random = random.Random(seed)
        self.disk, self.directory, self.partition = begun(seed=seed)
        self.log = BatchLog(pick, segment_bytes_max=pick.choice([300, 2000, 8000]))
        if pick.random() < 0.3:
            self.log.first = [run_for(0, 0, pick.randrange(1, 9))]
            self.partition.append(3, self.log.first, -1)

    def step(self) -> None:
        choice = self.random.random()
        if choice < 0.6:
            self.append()
        elif choice < 0.75:
            self.cut()
        elif choice < 0.8:
            self.partition.checkpoint()
        else:
            self.restart()

    def append(self) -> None:
        """Some of what is here may be sent once more."""
        again = self.log.batches[-self.random.randrange(1, 4) :] if self.random.random() < 0.3 else []
        new = self.log.draw(self.random.randrange(0 if again else 1, 4))
        twice: list[Batch] = new[-1:] if self.random.random() < 0.1 else []
        self.log.batches += new
        assert self.partition.append(self.partition.promised_session, [*again, *new, *twice], -1) == self.log.last_id

    def cut(self) -> None:
        session = self.partition.promised_session + 1
        self.partition.open_session(session)
        mark = self.random.randrange(-1, self.log.last_id + 1)
        right = self.log.lands_on(mark)
        assert self.partition.truncate(session, mark).last_id == right
        self.log.cut(right)

    def restart(self) -> None:
        how = self.random.randrange(4)
        if how == 0:
            self.directory.close()
        elif how == 1:
            self.disk.kill()
        else:
            self.disk.power_cut(Loss.ORDERED if how == 2 else Loss.SCATTERED)
        self.directory = open_directory(self.disk)
        self.partition = self.directory.partition(0)

    def check(self) -> None:
        self.log.check(self.partition)
        self.log.check_files(self.disk, HOME, KEY)


@pytest.mark.parametrize("seed", range(60))
def test_a_replica_is_a_list_of_batches(seed: int) -> None:
    story = Story(seed)
    for _ in range(25):
        story.step()
        story.check()

"""A few storms over a whole cluster; `./dev storm` makes more of them."""

from __future__ import annotations

import pytest

from tests.simulation.storm import blow


@pytest.mark.parametrize("seed", range(12))
def test_what_clients_were_told_is_true_after_the_storm(seed: int) -> None:
    _, verdict = blow(seed)
    assert verdict.is_sound, str(verdict)
    assert verdict.counts["committed"] >= 20

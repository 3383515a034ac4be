"""Evaluations beside training: what they find, what they leave alone, what they keep, and what is said."""

from __future__ import annotations

import pytest
from training_fixtures import Start, assert_equal_tensors, measured, newest, steps

pytest_plugins = ["training_fixtures"]
pytestmark = pytest.mark.usefixtures("small")


@pytest.mark.parametrize("stage", ["dvae", "gpt", "decoder"])
@pytest.mark.parametrize("where", ["data", "cpu"])
def test_evaluations_on_the_side_change_nothing_and_find_the_same(stage: str, where: str, start: Start) -> None:
    flags = f"--stages {stage} --dropout 0.2 --ema-decay 0.9 --max-steps 6 --val-data {start.clips(3)}"
    inside = start(f"{flags} --val-step 3 --evaluate-on model --deterministic", "inside")
    beside = start(f"{flags} --val-step 3 --evaluate-on {where} --deterministic", "beside")
    assert "Evaluations run on cpu while training goes on" in start.out
    never = start(f"{flags} --evaluate-on off", "never")
    for run in (inside, beside):
        assert_equal_tensors(newest(run, stage).weights, newest(never, stage).weights)
        assert_equal_tensors(newest(run, stage).optimizer, newest(never, stage).optimizer)
    assert not steps(never, "validation")
    ours, theirs = (sorted(measured(run), key=str) for run in (beside, inside))
    assert ours == theirs
    assert newest(beside, stage).state == newest(inside, stage).state

from recorded_runs import recipe, recorded

from rlkit.diagnosis import diagnose
from rlkit.signal_table import MEANINGS, signal_table
from rlkit.signals import Signals


def test_every_signal_has_a_unit_and_an_origin() -> None:
    assert set(MEANINGS) == set(Signals().numbers())
    assert all(meaning.unit and meaning.origin and meaning.says.endswith(".") for meaning in MEANINGS.values())


def test_the_table_has_what_was_logged() -> None:
    rows = {row[0]: row for row in signal_table(diagnose(recorded("trainer-bound-run"), recipe())).to_numpy().tolist()}

    assert rows["step_s"][2:4] == ["s", "perf/step_s"]
    assert "inflight_cap" not in rows

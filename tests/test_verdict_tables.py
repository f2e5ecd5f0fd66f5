from __future__ import annotations

import pandas as pd
import pytest
from recorded_runs import recipe, recorded

from rlkit.diagnosis import diagnose
from rlkit.verdict_tables import cause_table, explained_signals, ledger_table, stretch_table

VERDICT = diagnose(recorded("learning-run"), recipe())


def test_causes_come_with_what_they_cost_and_what_to_change() -> None:
    table = cause_table(VERDICT)

    assert list(table["Cause"]) == [cause.text for cause in VERDICT.causes]
    assert table["Costs a step"].iloc[0].endswith(" s")
    assert table["What to change"].iloc[0].startswith("Raise ")


def test_stretches_cover_the_settled_steps() -> None:
    table = stretch_table(VERDICT)

    assert table["Steps"].iloc[-1].endswith("50")
    assert set(table["Bound by"]) == {"generation"}
    assert all(text[:1].isupper() and text.endswith(".") for text in table["What decided"])


def test_the_ledger_adds_up_for_each_side() -> None:
    table = ledger_table(recorded("learning-run"), recipe())

    shares = table["Of that side"].str.extract(r"([\d.]+)")[0].astype(float)
    assert dict(shares.groupby(table["Side"]).sum()) == {
        "replicas": pytest.approx(100, abs=2),
        "trainer": pytest.approx(100, abs=4),
    }
    assert "Cost" not in table  # nobody pays for this machine
    assert ledger_table(recorded("learning-run"), None).empty
    priced = recipe().with_overrides(["hardware.usd_per_hour=10"])
    assert ledger_table(recorded("learning-run"), priced)["Cost"].iloc[0].endswith(" $")


def test_every_signal_is_explained() -> None:
    table = explained_signals(VERDICT)

    assert len(table) == sum(value is not None for value in VERDICT.signals.values())
    row = table.set_index("Signal").loc["wait share"]
    assert isinstance(row, pd.Series)
    assert row["Value"].endswith("of the step")
    assert row["What it says"] == "High when generation is too slow."

"""Rented hardware started from the form: its price is said and agreed to by a second button, or nothing happens."""

from __future__ import annotations

from pathlib import Path

import pytest
from hub.emulated_image import IMAGE
from hub.hub_server import EmulatedHub
from hub.stand_ins import assert_nothing_is_lost

from rlkit.engines.hf_money import Price
from rlkit.engines.hf_offer import in_short
from rlkit.engines.state import read_state
from rlkit.launch_form import LaunchForm
from rlkit.run_folder import RunFolder

pytestmark = [pytest.mark.hub, pytest.mark.slow]

SMOKE = Path(__file__).parents[2] / "runs" / "published" / "r1-dp2.yaml"


@pytest.fixture
def form(hub: EmulatedHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LaunchForm:
    monkeypatch.setenv("RLKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    hub.image |= IMAGE
    return LaunchForm(str(SMOKE), ["train.steps=10"], str(tmp_path / "smoke"), predicting=False)


def is_asking(form: LaunchForm) -> bool:
    return bool(form._question.layout.display != "none")


def test_price_that_is_not_agreed_to_leaves_nothing(form: LaunchForm, hub: EmulatedHub) -> None:
    assert not is_asking(form)
    form._pay.click()  # nothing was asked yet
    form._start.click()
    assert is_asking(form)
    assert "$20.00 an hour, about $" in form._said.value
    assert form._pay.description.startswith("Start for about $")
    form._leave.click()
    assert not is_asking(form)
    assert "Nothing was started" in form._said.value
    assert not form._start.disabled
    # Another recipe than the one that was priced cannot be agreed to.
    form._start.click()
    form._fields["train.steps"].value = "20"
    assert not is_asking(form)
    form._pay.click()
    assert not form.started
    assert not Path(form.folder).exists()
    assert not hub.jobs


def test_price_that_cannot_be_had_is_said(form: LaunchForm, hub: EmulatedHub) -> None:
    hub.faults.answers.append(("GET", "/api/jobs/hardware", 403, 1))
    form._start.click()
    assert not is_asking(form)
    assert "the token may not do that" in form._said.value
    assert not form._start.disabled
    assert not hub.jobs


def test_run_that_is_agreed_to_goes_on_in_the_background_to_its_end(form: LaunchForm, hub: EmulatedHub) -> None:
    form._start.click()
    form._pay.click()
    assert form.started
    assert not is_asking(form)
    form._pay.click()  # once
    folder = RunFolder(Path(form.folder))
    hub.until(lambda: read_state(folder).get("status") in ("finished", "failed", "stopped"))
    assert read_state(folder)["status"] == "finished", folder.engine_log.read_text()
    assert_nothing_is_lost(hub, folder)
    assert [job.stage for job in hub.of_role("trainer")] == ["COMPLETED"]
    hub.until(folder.report.exists)  # as `rlkit run` leaves it


def test_what_the_button_says() -> None:
    assert in_short(Price(20.0, 0.5, 2.0, None)) == "about $10.00"
    assert in_short(Price(20.0, None, 2.0, None)) == "at most $40.00"

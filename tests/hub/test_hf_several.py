"""Several runs on Jobs at once from one machine, within one budget."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hub.hub_server import EmulatedHub
from hub.stand_ins import SERVE, TRAINS, WAITS, assert_nothing_is_lost
from huggingface_hub import HfApi

from rlkit.engines.hf import HfOptions, launch_hf
from rlkit.engines.hf_money import Purse, hourly_prices, price_of
from rlkit.engines.state import read_state
from rlkit.errors import RunFailed
from rlkit.recipe import Recipe
from rlkit.run_folder import RunFolder

pytestmark = [pytest.mark.hub, pytest.mark.slow]


def test_each_ends_within_its_allowance(hub: EmulatedHub, api: HfApi, recipe: Recipe, tmp_path: Path) -> None:
    """One trains, the other would go on for ever and is ended by what was set aside for it."""
    prices = hourly_prices(api.list_jobs_hardware())
    purse = Purse(total_usd=1.0, at_once=2)
    scripts = {"trains": TRAINS, "waits": WAITS}
    folders = {name: RunFolder(tmp_path / name) for name in scripts}

    def run(name: str, most_usd: float) -> float:
        one = recipe.with_overrides(["serve.replicas=1", f"hardware.budget_usd={most_usd}"])
        usd = purse.allow(name, price_of(one, prices, step_s=None))
        assert usd == most_usd
        one = one.with_overrides([f"hardware.budget_usd={usd}"])
        train = ("python3", "-c", scripts[name])
        options = HfOptions(api=api, serve=SERVE, train=train, poll_s=0.05, lease_s=600, first_wait_s=0.01)
        try:
            launch_hf(one, folders[name], lambda event: None, options=options)
        finally:
            spent = float(read_state(folders[name])["usd"])
            purse.ended(name, spent)
        return spent

    with ThreadPoolExecutor(2) as pool:
        trains, waits = pool.submit(run, "trains", 0.99), pool.submit(run, "waits", 0.01)
        assert trains.result() < 0.99
        with pytest.raises(RunFailed, match=r"hardware.budget_usd: \$0.01"):
            waits.result()
    assert read_state(folders["trains"])["status"] == "finished"
    assert purse.going == 0
    for folder in folders.values():
        assert_nothing_is_lost(hub, folder)

"""What a recipe would cost on Hugging Face Jobs, asked of the Hub before anything is started."""

from __future__ import annotations

from rlkit.engines.hf_hub import Hub
from rlkit.engines.hf_money import Price, hourly_prices, price_of
from rlkit.engines.hf_predict import predicted_step_s
from rlkit.recipe import Recipe


def offer(recipe: Recipe) -> Price:
    """The price of a whole run; starts nothing. Raises RlkitError: no token, no answer, or an unknown flavor."""
    hub = Hub.connect(recipe.hardware.namespace)
    return price_of(recipe, hourly_prices(hub.prices()), predicted_step_s(recipe))


def in_short(price: Price) -> str:
    """A few words for a button: what the run costs as predicted, else what it can cost at most."""
    return f"about ${price.usd:,.2f}" if price.usd is not None else f"at most ${price.most_usd:,.2f}"

"""Numbers as sentences write them."""

from __future__ import annotations


def number(value: float) -> str:
    """Three digits, or a whole number from 100 on."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def percent(fraction: float) -> str:
    """A fraction in whole percent, below one percent with a decimal."""
    if 0 < fraction < 0.001:
        return "under 0.1 %"
    return f"{100 * fraction:.{0 if fraction == 0 or abs(fraction) >= 0.01 else 1}f} %"

"""Numbers as sentences write them."""

from __future__ import annotations


def number(value: float) -> str:
    """Three digits, or a whole number from 100 on.

    >>> number(0.12345), number(12.345), number(12345.6)
    ('0.123', '12.3', '12,346')
    """
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def percent(fraction: float) -> str:
    """A fraction in whole percent, below one percent with a decimal.

    >>> percent(0.874), percent(0.0042), percent(0.0001)
    ('87 %', '0.4 %', 'under 0.1 %')
    """
    if 0 < fraction < 0.001:
        return "under 0.1 %"
    return f"{100 * fraction:.{0 if fraction == 0 or abs(fraction) >= 0.01 else 1}f} %"

"""How right the diagnosis is: simulated runs, what an intervention shows to bound each, and a confusion matrix.

scenarios.py makes the runs (paired.py: of lengths that two runs share), interventions.py labels them, store.py
keeps them, evaluate.py compares the verdicts with the labels.
"""

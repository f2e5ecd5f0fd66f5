"""How right the diagnosis is: simulated runs, what an intervention shows to bound each, and a confusion matrix.

scenarios.py makes the runs, interventions.py labels them, evaluate.py compares the verdicts with the labels.
"""

"""How many rollouts may be in flight: the admission cap.

`law` the contract of a law (readings in, a cap and its reason out); `published` and `adaptive` the two laws; `readings`
/metrics pages to readings; `gate` who may start, given the cap; `spread` how unlike the replicas are; `gauges` what
the worker logs of it; `poll` asks for the page; `asked` is the limit that a person sets while the run goes on, a file.
All but `poll` and `asked` are pure: time and pages come in as arguments.
"""
